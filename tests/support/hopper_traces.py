"""Read the order of operations in Hopper kernels that are traced for an absent H200."""

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
            # An array of `stages` barriers belongs to the slots.
            case "barrier_arrive" if eqn.invars[0].aval.shape == (stages,):
                step = made_by.get(made_by[eqn.invars[1]].invars[0])  # % stages
                is_before = step is not None and step.primitive.name == "sub"
                events.append(("released", step.invars[1].val if is_before else 0))
    return events
