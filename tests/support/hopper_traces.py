"""Read the order of operations in Hopper kernels that are traced for an absent H200."""

from jax.extend.core import jaxprs_in_params
from jax.sharding import AbstractDevice, AbstractMesh

from tests.support.primitives import equations

H200 = AbstractMesh(
    (), (), abstract_device=AbstractDevice("NVIDIA H200", num_cores=132, platform="gpu")
)


def order(jaxpr, stages):
    """Return the events of a kernel's WGMMAs and of their slots, in program order.

    'wgmma' is the start of one. ('left', n) is a wait after which n may still run.
    ('released', n) gives back the slot of the step n steps before the current one.
    """
    made_by, events = {}, []
    for eqn, _ in equations(jaxpr):
        made_by |= dict.fromkeys(eqn.outvars, eqn)
        match eqn.primitive.name:
            case "wgmma_ref":
                events.append("wgmma")
            case "wgmma_wait":
                events.append(("left", eqn.params["n"]))
            case "wgmma_accumulator_deref_p":
                events.append(("left", eqn.params["wait_n"]))
            # An array of `stages` barriers belongs to the slots; blanked rows have one.
            case "barrier_arrive" if eqn.invars[0].aval.shape == (stages,):
                step = made_by.get(made_by[eqn.invars[1]].invars[0])  # % stages
                is_before = step is not None and step.primitive.name == "sub"
                events.append(("released", step.invars[1].val if is_before else 0))
    return events


def broken_barrier_rules(jaxpr) -> set[str]:
    """Return the rules for barriers='own' that a traced kernel breaks, in any order of
    its branches and loops.

    Threads of a warpgroup may run apart, so commit_smem, which is a fence for copies
    and a barrier of the warpgroup, must stand between

        a store into an array of shared memory, and a store, a load or a copy of it
        a load from it, and a store or a copy into it
    """
    broken = set()
    _walk_memory(jaxpr, {}, broken)
    return broken


FORBIDDEN = {
    "store": ("stored", "loaded"),
    "load": ("stored",),
    "copy out": ("stored",),
    "copy in": ("stored", "loaded"),
}
"""What may not have happened to an array since the last commit_smem, by event."""
ACCESSES = {
    "swap": ("store", 0),
    "get": ("load", 0),
    "load": ("load", 0),
    "copy_smem_to_gmem": ("copy out", 0),
    "copy_gmem_to_smem": ("copy in", 1),
}
"""Event of a primitive, and which of its operands is the array of shared memory."""


def _walk_memory(jaxpr, state, broken):
    """Add to `broken` what a program breaks, and return what has happened to each array
    since the last commit_smem, which was `state` before."""
    for eqn in getattr(jaxpr, "jaxpr", jaxpr).eqns:
        name, bodies = eqn.primitive.name, list(jaxprs_in_params(eqn.params))
        if name == "commit_smem":
            state = {}
        elif name in ACCESSES:
            event, operand = ACCESSES[name]
            state = _after(event, eqn.invars[operand].aval, state, broken)
        elif name == "cond":
            ends = [_walk_memory(body, state, broken) for body in bodies]
            keys = {key for end in ends for key in end}
            state = {k: set().union(*(end.get(k, ()) for end in ends)) for k in keys}
        else:
            for body in bodies * 2:  # a loop's second run follows its first
                state = _walk_memory(body, state, broken)
    return state


def _after(event, aval, state, broken):
    if not str(getattr(aval, "memory_space", "")).endswith("smem"):
        return state
    array = aval.shape
    before = state.get(array, set())
    broken |= {
        f"{event} of {array} that was {old}"
        for old in FORBIDDEN[event]
        if old in before
    }
    done = {"store": {"stored"}, "load": {"loaded"}}.get(event, set())
    return state | {array: before | done}
