"""Count the primitives and the FLOPs of a program in its jaxpr."""

import math
from collections import Counter
from collections.abc import Iterator

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr, jaxprs_in_params


def primitives(jaxpr: ClosedJaxpr | Jaxpr) -> Counter:
    """Return how often each primitive occurs; the body of a loop counts once."""
    return Counter(eqn.primitive.name for eqn, _ in equations(jaxpr))


def equations(jaxpr: ClosedJaxpr | Jaxpr, times: int = 1) -> Iterator[tuple]:
    """Yield (equation, number of times that it runs) for a jaxpr and everything that it
    calls.

    The body of a scan runs `length` times. The body of a while loop counts as one run.
    """
    jaxpr = jaxpr.jaxpr if isinstance(jaxpr, ClosedJaxpr) else jaxpr
    for eqn in jaxpr.eqns:
        yield eqn, times
        inner = times * eqn.params["length"] if eqn.primitive.name == "scan" else times
        for body in jaxprs_in_params(eqn.params):
            yield from equations(body, inner)


def dot_flops(function, *args):
    """Return the FLOPs of every dot_general that runs, two for each multiply-add."""
    total = 0
    for eqn, times in equations(jax.make_jaxpr(function)(*args)):
        assert eqn.primitive.name not in ("while", "conv_general_dilated")
        if eqn.primitive.name == "dot_general":
            (contracted, _), _ = eqn.params["dimension_numbers"]
            depth = math.prod(eqn.invars[0].aval.shape[i] for i in contracted)
            total += times * 2 * depth * math.prod(eqn.outvars[0].aval.shape)
    return total
