"""Rich forms: the views by which a notebook shows objects of moejax.

`moejax.show` draws the views, and imports the types that it draws. A type therefore
names its view as text, and the view is loaded when a notebook asks for it.
"""

import pkgutil
from collections.abc import Callable


def shown_by[T: type](view: str) -> Callable[[T], T]:
    """Return a decorator of classes whose objects the function `view` of moejax.show
    draws: as HTML in a notebook, and as lines in a terminal of IPython.

    `print` and `repr` stay as the class defines them.
    """

    def draw(value):
        return pkgutil.resolve_name(f"moejax.show:{view}")(value)

    def decorate(kind: T) -> T:
        kind._repr_html_ = lambda self: draw(self)._repr_html_()
        kind._repr_pretty_ = lambda self, printer, cycle: printer.text(str(draw(self)))
        return kind

    return decorate
