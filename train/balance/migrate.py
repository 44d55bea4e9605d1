"""Move the experts of a TrainState to new owners or to another store, compiled ahead.

The float32 master parameters of the experts and their optimizer moments move.
"""

import jax

from moejax.axes import everywhere, sharding
from moejax.moe.weights.migrate import exchanges, move, no_rounds, reshard
from moejax.plan.expert_plan import ExpertPlan
from train.step.expert_params import is_expert
from train.step.state import TrainState, abstract_state
from train.step.step import StepContext


class Mover:
    """Programs that move a training state to the owners of a plan, or to another store.

    Programs are compiled by the prepare methods, or when they are first needed; each
    donates its state. Between two calls a state is complete: every expert has exactly
    one owner.
    """

    def __init__(self, model: StepContext) -> None:
        self._model = model
        self._move = None
        self._reshard: dict[str, object] = {}

    def prepare_moves(self) -> None:
        """Compile the program that moves experts to other owners."""
        if self._move is None:
            self._move = _compile_move(self._model)

    def prepare_reshard(self, store: str) -> None:
        """Compile the program that reshards experts in logical order for this store.

        The program starts from the other kind of store: 'sharded' or not.
        """
        if store not in self._reshard:
            self._reshard[store] = _compile_reshard(self._model, store)

    def to_owners(self, state: TrainState, old: ExpertPlan, new: ExpertPlan):
        """Return the state with the experts' master parameters and moments on the
        owners of plan `new`."""
        layout = self._model.layout
        for rounds in exchanges(old.owned_le, new.owned_le, layout.num_devices):
            self.prepare_moves()
            state = self._move(state, everywhere(rounds, self._model.mesh))
        return state

    def to_store(self, state: TrainState, old: str, new: str):
        """Return the state, in logical order, in the sharding of the store `new`."""
        if (old == "sharded") == (new == "sharded"):
            return state
        store = "sharded" if new == "sharded" else "owned"
        self.prepare_reshard(store)
        return self._reshard[store](state)


def _compile_move(model: StepContext):
    state = abstract_state(model.run, model.optimizer)
    rounds = no_rounds(model.layout.num_experts, model.layout.num_devices)
    whole = sharding(model.mesh)
    rounds = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=whole),
        rounds,
    )

    def run(state, rounds):
        mesh_layout = model.run.owning_on_mesh
        return _change_experts(
            state, lambda *experts: move(*experts, rounds, mesh_layout)
        )

    return _jit(run, state).lower(state, rounds).compile()


def _compile_reshard(model: StepContext, store: str):
    from_store = "owned" if store == "sharded" else "sharded"
    before, after = (
        abstract_state(model.run, model.optimizer, s) for s in (from_store, store)
    )

    def run(state):
        mesh_layout = model.run.owning_on_mesh
        return _change_experts(
            state, lambda *experts: reshard(*experts, store, mesh_layout)
        )

    return _jit(run, after).lower(before).compile()


def _jit(run, after: TrainState):
    shardings = jax.tree.map(lambda leaf: leaf.sharding, after)
    return jax.jit(run, donate_argnums=0, out_shardings=shardings)


def _change_experts(state: TrainState, change) -> TrainState:
    """Return the state with the arrays of the experts, moments included, replaced by
    change(arrays, names)."""
    leaves, tree = jax.tree_util.tree_flatten_with_path(state)
    index = [i for i, (path, _) in enumerate(leaves) if is_expert(path)]
    names = [leaves[i][0][-1].key for i in index]
    flat = [leaf for _, leaf in leaves]
    for i, new in zip(index, change([flat[i] for i in index], names), strict=True):
        flat[i] = new
    return jax.tree.unflatten(tree, flat)
