"""Muon against NumPy in float64, whole and split over devices, and frozen parameters:
without gradient, moment or change."""

import functools
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from moejax.axes import make_mesh
from moejax.config import Optimizer
from moejax.model.parameters import is_frozen, is_matrix, name_of, shapes_by_name
from moejax.plan.layout import Topology
from moejax.resolve.memory import state_bytes
from moejax.resolve.resolved import resolve
from tests.support.close import assert_close
from tests.support.steps import STORES, configure, make_windows
from train.step.compiled import make_model, on_devices
from train.step.gradient_target import gradient_target
from train.step.optimizer import learning_rate, make_optimizer
from train.step.state import abstract_state, bytes_per_device, init_state
from train.step.step import make_train_step

MUON = Optimizer(
    name="muon", learning_rate=0.1, warmup_steps=2, weight_decay=0.1, clip_norm=0.0
)
SHAPES = {
    "cycles": {
        "blocks": {
            0: {
                "attention": {"q_dhi": (2, 8, 12), "out_hid": (2, 12, 8)},
                "moe": {
                    "gate_edf": (2, 4, 8, 16), "down_efd": (2, 4, 16, 8),
                    "router_de": (2, 8, 4), "gate_bias_ef": (2, 4, 16),
                },
                "ff_norm": {"scale_d": (2, 8)},
            }
        }
    },
    "embed_vd": (32, 8),
}  # fmt: skip
SPECS = {
    "q_dhi": P(None, ("data", "expert"), "tensor"),
    "out_hid": P(None, "tensor", ("data", "expert")),
    "gate_edf": P(None, "expert", "data", "tensor"),
    "down_efd": P(None, "expert", "tensor", "data"),
}
"""How the matrices lie on a mesh of data, expert and tensor axes; others are whole."""


def random_trees(num: int) -> list:
    """Return trees of normal numbers."""
    rng = np.random.default_rng(0)
    is_shape = lambda leaf: isinstance(leaf, tuple)  # noqa: E731
    draw = lambda shape: rng.standard_normal(shape).astype(np.float32)  # noqa: E731
    return [jax.tree.map(draw, SHAPES, is_leaf=is_shape) for _ in range(num)]


def updated(grads: list, params, shardings=None):
    """Return the parameters after an update with each of the gradients."""
    optimizer = make_optimizer(MUON, 10)

    @jax.jit
    def step(grad, state, params):
        found = optimizer.update(grad, state, params, shardings=shardings)
        return jax.tree.map(jnp.add, params, found[0]), found[1]

    state = optimizer.init(params)
    for grad in grads:
        params, state = step(grad, state, params)
    return params


def orthogonal(matrix: np.ndarray) -> np.ndarray:
    """Return Muon's orthogonal factor of a matrix: five steps of the polynomial
    3.4445 x - 4.7750 x^3 + 2.0315 x^5 in its singular values."""
    u, sigma, vt = np.linalg.svd(matrix, full_matrices=False)
    sigma = sigma / np.linalg.norm(matrix)
    for _ in range(5):
        sigma = 3.4445 * sigma - 4.7750 * sigma**3 + 2.0315 * sigma**5
    return (u * sigma) @ vt


def by_numpy(path, param, grads) -> np.ndarray:
    """Return a parameter after updates, by the definitions in float64."""
    name, w = name_of(path), param.astype(np.float64)
    mu = nu = np.zeros_like(w)
    is_decayed = not any(x in name for x in ("scale_d", "embed_vd", "bias"))
    for count, grad in enumerate(np.float64(grads), start=1):
        if is_matrix(name, w.shape):
            mu = 0.95 * mu + 0.05 * grad
            ahead = 0.95 * mu / (1 - 0.95 ** (count + 1)) + 0.05 * grad / (
                1 - 0.95**count
            )
            flat = ahead.reshape(-1, *w.shape[-2:])
            found = np.stack([orthogonal(x) for x in flat]).reshape(w.shape)
            found *= 0.2 * np.sqrt(max(w.shape[-2:]))
        else:
            mu, nu = 0.9 * mu + 0.1 * grad, 0.95 * nu + 0.05 * grad**2
            root = np.sqrt(nu / (1 - 0.95**count)) + MUON.eps
            found = mu / (1 - 0.9**count) / root
        rate = float(learning_rate(MUON, 10)(count - 1))
        w = w - rate * (found + MUON.weight_decay * is_decayed * w)
    return w


@pytest.mark.parametrize("is_split", [False, True], ids=["whole", "split"])
def test_updates_are_those_of_the_definitions(is_split):
    """Each matrix of a stack is made orthogonal by itself, wherever its parts lie."""
    params, *grads = random_trees(4)
    expected = jax.tree_util.tree_map_with_path(by_numpy, params, *[
        jax.tree.map(lambda *x: np.stack(x), *grads)
    ])  # fmt: skip
    shardings = None
    if is_split:
        mesh = make_mesh(Topology(data=2, expert=2, tensor=2))
        shardings = jax.tree_util.tree_map_with_path(
            lambda path, _: NamedSharding(mesh, SPECS.get(path[-1].key, P())), params
        )
        params, *grads = (jax.device_put(x, shardings) for x in (params, *grads))
    found = updated(grads, params, shardings)
    assert_close(found, expected, dtype=np.float32)
    if is_split:
        assert jax.tree.map(lambda leaf: leaf.sharding, found) == shardings


def abstract(**optimizer):
    """Return the configuration and abstract state of a small run."""
    cfg = configure("deepseek", optimizer=optimizer)
    run = resolve(cfg, make_mesh(cfg.mesh))
    return cfg, abstract_state(run, make_optimizer(cfg.optimizer, 10))


@pytest.mark.parametrize("mu_dtype", ["float32", "bfloat16"])
def test_matrices_have_one_average_where_they_rest(mu_dtype):
    """Its dtype is mu_dtype. The dry run, for which small parameters count as split,
    predicts fewer bytes."""
    cfg, state = abstract(name="muon", mu_dtype=mu_dtype)
    muon = state.opt_state[1].inner_states["muon"].inner_state
    assert not hasattr(muon, "nu")
    params = {
        name_of(path): leaf
        for path, leaf in jax.tree_util.tree_flatten_with_path(state.params)[0]
    }
    averages = jax.tree_util.tree_flatten_with_path(muon.mu)[0]
    assert {name_of(path) for path, _ in averages} == {
        name for name, leaf in params.items() if is_matrix(name, leaf.shape)
    }
    for path, leaf in averages:
        assert leaf.dtype == mu_dtype
        assert leaf.sharding == params[name_of(path)].sharding
    held, predicted = bytes_per_device(state, cfg.optimizer), state_bytes(cfg)
    _, plain = abstract(mu_dtype=mu_dtype)
    whole = bytes_per_device(plain, cfg.optimizer)["moments"]
    assert held["moments"] < whole
    second = sum(
        4 * np.prod(leaf.sharding.shard_shape(leaf.shape)) for _, leaf in averages
    )
    own_count = 4  # Muon counts its updates too
    assert whole - held["moments"] == second - own_count
    assert predicted["moments"] < held["moments"]


def test_frozen_parameters_have_no_moment_and_no_gradient():
    cfg, state = abstract(frozen=("experts", "router", "*/attention/q_*"))
    frozen = [
        n for n in shapes_by_name(cfg.network) if is_frozen(n, cfg.optimizer.frozen)
    ]
    assert any("gate_edf" in name for name in frozen)
    assert any("q_a_dr" in name for name in frozen)
    moments = jax.tree_util.tree_flatten_with_path(state.opt_state[1].mu)[0]
    names = {name_of(path) for path, _ in moments}
    assert names == set(shapes_by_name(cfg.network)) - set(frozen)
    held = bytes_per_device(state, cfg.optimizer)
    assert held["moments"] < 2 * held["trained"] + 64 < 2 * held["params"]
    for dispatch in ({}, STORES["resident"]):
        cfg = configure(optimizer={"frozen": ("experts",)}, dispatch=dispatch)
        model = make_model(resolve(cfg, make_mesh(cfg.mesh)))
        place = on_devices(model.run.home_plan(), model.layout, model.mesh)
        target = functools.partial(gradient_target, model.run, placement=place)
        of = abstract_state(model.run, model.optimizer, model.layout.store)
        values = jax.eval_shape(lambda state, target=target: target(state).values, of)
        sizes = [leaf.ndim for leaf in jax.tree.leaves(values)]
        assert max(sizes) == 3  # experts' matrices have four dims


@pytest.mark.slow
@pytest.mark.parametrize("store", ["owned", "resident"])
def test_frozen_parameters_keep_their_bits_and_the_others_train_alike(store):
    """Without clipping an update depends on a parameter's own gradient alone."""
    after = {}
    for frozen in ((), ("experts", "embedding")):
        optimizer = {"frozen": frozen, "clip_norm": 0.0}
        cfg = configure(optimizer=optimizer, dispatch=STORES[store])
        model = make_model(resolve(cfg, make_mesh(cfg.mesh)))
        place = on_devices(model.run.home_plan(), model.layout, model.mesh)
        state = init_state(model.run, model.optimizer, model.layout.store)
        before = jax.device_get(state.params)
        state, _ = make_train_step(model)(
            state, place, make_windows(SimpleNamespace(model=model))
        )
        after[frozen] = jax.tree_util.tree_flatten_with_path(
            jax.device_get((before, state.params))
        )[0]
    plain, frozen = after.values()
    half = len(plain) // 2
    for (path, old), (_, new), (_, free) in zip(
        frozen[:half], frozen[half:], plain[half:]
    ):
        if is_frozen(name_of(path[1:]), ("experts", "embedding")):
            np.testing.assert_array_equal(new, old)
            assert (free != old).any()
        else:
            assert_close(new, free)


@pytest.mark.parametrize(
    ("frozen", "line"),
    [
        (("expert",), "'expert' matches no parameter of this model.*experts"),
        (("shared",), "'shared' matches no parameter of this model"),
        (("*",), "freezes all"),
    ],
)
def test_names_that_freeze_nothing_or_all_are_refused(frozen, line):
    cfg = configure(optimizer={"frozen": frozen})
    with pytest.raises(ValueError, match=line):
        resolve(cfg, make_mesh(cfg.mesh))
