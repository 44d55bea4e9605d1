"""primitives: what a program computes with, counted in its jaxpr."""

from collections import Counter
from collections.abc import Iterator

from jax.extend.core import ClosedJaxpr, Jaxpr, jaxprs_in_params


def primitives(jaxpr: ClosedJaxpr | Jaxpr) -> Counter:
    """How often each primitive is named; the body of a loop counts once."""
    return Counter(eqn.primitive.name for eqn, _ in equations(jaxpr))


def equations(jaxpr: ClosedJaxpr | Jaxpr, times: int = 1) -> Iterator[tuple]:
    """(equation, times that it runs) of a jaxpr and of all that it calls: a scan's body
    runs its length, a while loop's is taken to run once."""
    jaxpr = jaxpr.jaxpr if isinstance(jaxpr, ClosedJaxpr) else jaxpr
    for eqn in jaxpr.eqns:
        yield eqn, times
        inner = times * eqn.params["length"] if eqn.primitive.name == "scan" else times
        for body in jaxprs_in_params(eqn.params):
            yield from equations(body, inner)
