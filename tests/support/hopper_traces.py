"""Hopper kernels as they are traced for an H200 that is not here."""

from jax.sharding import AbstractDevice, AbstractMesh

from tests.support.primitives import equations

H200 = AbstractMesh(
    (), (), abstract_device=AbstractDevice("NVIDIA H200", num_cores=132, platform="gpu")
)


def order(jaxpr, stages):
    """Return what a WGMMA and its slot go through, in program order: begun; how many
    may still run behind a wait; whose slot is given back, in steps before."""
    made_by, found = {}, []
    for eqn, _ in equations(jaxpr):
        made_by |= dict.fromkeys(eqn.outvars, eqn)
        match eqn.primitive.name:
            case "wgmma_ref":
                found.append("wgmma")
            case "wgmma_wait":
                found.append(("left", eqn.params["n"]))
            case "wgmma_accumulator_deref_p":
                found.append(("left", eqn.params["wait_n"]))
            # The barrier of blanked rows is a single one.
            case "barrier_arrive" if eqn.invars[0].aval.shape == (stages,):
                step = made_by.get(made_by[eqn.invars[1]].invars[0])  # % stages
                is_before = step is not None and step.primitive.name == "sub"
                found.append(("released", step.invars[1].val if is_before else 0))
    return found
