"""Test the layer as other programs use it: the examples of docs/use_the_layer.md,
errors, and the wheel."""

import dataclasses
import importlib.metadata
import os
import re
import subprocess
import sys
import venv
import zipfile

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax._src.dispatch import BACKEND_COMPILE_EVENT
from jax.sharding import AxisType

import moejax
from moejax import Dispatch, ExpertPlan, MeshAxes, Moe, MoeLayer, Router, moe_layer
from moejax.moe import reference, route
from tests.support.close import assert_close
from tests.support.primitives import equations

SHAPE = (16, 8, 32)
MOE = Moe(num_experts=16, top_k=2, d_expert=48)
AUTO, EXPLICIT = AxisType.Auto, AxisType.Explicit
ROLES = MeshAxes(data="batch", expert="ep")


def make_mesh(sizes=(2, 4), names=("batch", "ep"), kind=AUTO):
    """Return a mesh with axes of one type."""
    return jax.make_mesh(sizes, names, (kind,) * len(names))


def set_up(mesh=None, shape=SHAPE, axes=ROLES, moe=MOE, **kwargs):
    """Return moejax.set_up with defaults for these tests."""
    return moejax.set_up(moe, mesh or make_mesh(), shape, axes=axes, **kwargs)


@pytest.fixture
def blocks(repo) -> list[str]:
    """The blocks of Python code of docs/use_the_layer.md."""
    page = (repo / "docs" / "use_the_layer.md").read_text()
    return re.findall(r"^```python\n(.*?)^```", page, re.DOTALL | re.MULTILINE)


@pytest.mark.long
@pytest.mark.slow
def test_the_page_runs_and_its_step_compiles_once(blocks, monkeypatch):
    monkeypatch.setattr(os, "environ", dict(os.environ))
    program, count, swap, policy, split, compare = blocks
    scope: dict = {"__name__": "page"}
    exec(count, scope)
    exec(program, scope)
    assert scope["loss"] < 1.0, "it began at the log of 50, 3.9"
    assert scope["compiled"].count("jit(train_step)") == 1

    def step():
        names = "model", "optimizer", "tokens", "targets", "placement", "setup"
        loss, sums = scope["train_step"](*(scope[name] for name in names))
        return float(loss), sums

    exec(swap, scope)
    assert scope["plan"] != scope["setup"].home_plan(2), "the loads are uneven"
    step()
    assert scope["compiled"].count("jit(train_step)") == 1
    for block in (policy, split):
        exec(block, scope)
        scope["shard"]((scope["model"], scope["optimizer"]), scope["setup"])
        scope["placement"] = scope["setup"].place(num_layers=2)
    assert np.isfinite(step()[0])
    assert scope["compiled"].count("jit(train_step)") == 2
    exec(compare, scope)
    assert_close(scope["actual_btd"].reshape(-1, 64), scope["expected_nd"])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sizes", "names", "kind", "policy"),
    [
        ((2, 4), ("batch", "ep"), EXPLICIT, "flexmoe"),
        ((4, 2), ("ep", "batch"), AUTO, "eplb"),
    ],
    ids=["explicit axes", "expert axis first, outside jit"],
)
def test_any_mesh_equals_the_reference_and_compiles_once(sizes, names, kind, policy):
    setup = set_up(make_mesh(sizes, names, kind), policy=policy)
    layer = moejax.shard(MoeLayer(MOE, SHAPE[-1], nnx.Rngs(0)), setup)
    x_btd = jax.random.normal(jax.random.key(1), SHAPE)
    placement = setup.place().layer(0)

    def loss(params, x_btd):
        y_btd, sums = moe_layer(params, x_btd, placement, setup)
        return jnp.sum((x_btd + y_btd) ** 2), (y_btd, sums)

    def defined(params, x_btd):
        x_nd = x_btd.reshape(-1, SHAPE[-1])
        router = params["router_de"], params["bias_e"], Router()
        routes, *_ = route.route(x_nd, *router, MOE.top_k)
        y_nd = reference.moe(x_nd, routes, params)
        return jnp.sum((x_nd + y_nd) ** 2), y_nd.reshape(SHAPE)

    params = jax.device_get(layer.params())
    expected = jax.jit(jax.grad(defined, (0, 1), has_aux=True))(params, x_btd)
    x_btd = jax.device_put(x_btd, setup.batch_sharding)
    gradient, compiled = jax.grad(loss, (0, 1), has_aux=True), []
    if kind is EXPLICIT:
        gradient = jax.jit(gradient)

    def listen(event: str, *_, fun_name: str = "", **__) -> None:
        if event == BACKEND_COMPILE_EVENT and re.search("moe_layer|loss", fun_name):
            compiled.append(fun_name)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        gradients, (y_btd, sums) = gradient(layer.params(), x_btd)
        num_compiled = len(compiled)
        gradient(layer.params(), x_btd + 1)
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
    assert len(compiled) == num_compiled > 0
    assert_close((gradients, y_btd), expected)
    losses = moejax.router_losses(sums.over_devices(), 16 * 8, 8)
    assert losses.balance >= 1.0
    assert sums.tokens_e.shape == (setup.num_batch_shards, 16)
    assert int(sums.tokens_e.sum()) == 16 * 8 * 2


def test_gradients_travel_in_the_dtype_of_the_setup():
    """Gradients of bfloat16 experts are sent over the axis on which they rest in
    bfloat16, and as float32 if the setup is changed to that."""
    setup = set_up()
    placement, layer = setup.place().layer(0), MoeLayer(MOE, SHAPE[-1], nnx.Rngs(0))
    x_btd = jnp.zeros(SHAPE, jnp.bfloat16)

    def sent(setup):
        def loss(params):
            y_btd, _ = moe_layer(params, x_btd, placement, setup)
            return jnp.sum(y_btd.astype(jnp.float32))

        return {
            (eqn.primitive.name, str(eqn.invars[0].aval.dtype))
            for eqn, _ in equations(jax.make_jaxpr(jax.grad(loss))(layer.params()))
            if "batch" in eqn.params.get("axis_name", ())
            and eqn.primitive.name in ("all_to_all", "reduce_scatter")
        }

    assert sent(setup) == {("all_to_all", "bfloat16")}
    wide = dataclasses.replace(setup, gradient_reduce_dtype="float32")
    assert sent(wide) == {("reduce_scatter", "float32")}


def with_layout(setup, **changes):
    """Return a setup whose layout has these changes."""
    return dataclasses.replace(
        setup, layout=dataclasses.replace(setup.layout, **changes)
    )


REFUSED = {
    "a router without its bias": (
        {"router": Router(bias=True)},
        ["Router.bias is True", "made without logit_bias_e", "router_bias"],
    ),
    "a layer of another Moe": (
        {"moe": dataclasses.replace(MOE, num_experts=24)},
        ["(24, 32, 48)", "the setup (16, 32, 48)", "the same Moe"],
    ),
    "another width": ({"x": (16, 8, 31)}, ["[batch, length, 32]", "[16, 8, 31]"]),
    "no length": ({"x": (16, 32)}, ["[batch, length, 32]", "[16, 32]"]),
    "tokens, not vectors": ({"dtype": jnp.int32}, ["floating point", "int32"]),
    "a batch that does not divide": (
        {"x": (12, 8, 32)},
        ["12 sequences", "8 devices", "batch, ep", "multiple of 8"],
    ),
    "a forgotten layer index": ({"layers": True}, ["3 layers", "placement.layer(i)"]),
    "another layout's placement": ({"slots": 5}, ["20 slots", "16", "place()"]),
    "choices of another number": (
        {"forced_btk": jnp.zeros((16, 8, 3), jnp.int32)},
        ["forced_btk", "[16, 8, 2]", "top_k=2", "[16, 8, 3]"],
    ),
    "choices that are no integers": (
        {"forced_btk": jnp.zeros((16, 8, 2))},
        ["forced_btk", "integer", "float32"],
    ),
    "jitter of another shape": (
        {"jitter_btd": jnp.zeros((16, 8, 2))},
        ["jitter_btd", "[16, 8, 32]"],
    ),
    "a record without choices": (
        {"router": Router(kind="recorded")},
        ["'recorded'", "forced_btk [16, 8, 2]"],
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_call_that_does_not_fit_is_refused_in_one_line(name):
    changes, words = REFUSED[name]
    setup = set_up(router=changes.pop("router", None))
    layer = MoeLayer(changes.pop("moe", MOE), SHAPE[-1], nnx.Rngs(0))
    x_btd = jnp.zeros(changes.pop("x", SHAPE), changes.pop("dtype", jnp.float32))
    placement = setup.place(num_layers=3)
    if not changes.pop("layers", False):
        placement = placement.layer(0)
    if slots := changes.pop("slots", None):
        wide = with_layout(setup, slots_per_device=slots, store="sharded")
        placement = wide.place().layer(0)
    with pytest.raises(ValueError) as error:
        layer(x_btd, placement, setup, **changes)
    assert_one_line(error, words)


def test_a_layer_beyond_the_last_is_refused_in_one_line():
    placement = set_up().place(num_layers=2)
    assert jax.tree.all(
        jax.tree.map(np.array_equal, placement.layer(-1), placement.layer(1))
    )
    for index in (2, -3):
        with pytest.raises(IndexError) as error:
            placement.layer(index)
        assert_one_line(error, [f"layer({index})", "2 layers"])


def test_arguments_in_another_order_are_refused_in_one_line():
    setup, layer = set_up(), MoeLayer(MOE, SHAPE[-1], nnx.Rngs(0))
    x_btd, placement = jnp.zeros(SHAPE), setup.place().layer(0)
    for wrong in ((placement, x_btd, setup), (x_btd, setup, placement)):
        with pytest.raises(ValueError) as error:
            layer(*wrong)
        assert_one_line(error, ["takes an array, a Placement and a LayerSetup"])
    loads_lwe, rngs = np.ones((1, 8, 16), int), nnx.Rngs(0)
    for call, words in (
        (lambda: moejax.set_up(make_mesh(), MOE, SHAPE),
         "a Moe and a Mesh first, and got Mesh and Moe"),
        (lambda: MoeLayer(SHAPE[-1], MOE, rngs), "a Moe, a width and rngs, and got i"),
        (lambda: moejax.shard(setup, layer), "LayerSetup, and got MoeLayer as the se"),
        (lambda: setup.place(np.arange(16)[None]), "an ExpertPlan, and got ndarray"),
        (lambda: moejax.make_plan(setup, loads_lwe, "eplb"), "got LayerSetup, loads"),
    ):  # fmt: skip
        with pytest.raises(ValueError) as error:
            call()
        assert_one_line(error, [words])
    placed, sums = setup.place().layer(0), None
    _, sums = jax.eval_shape(lambda x_btd: layer(x_btd, placed, setup), x_btd)
    with pytest.raises(ValueError) as error:
        moejax.router_losses(sums, 8, 16 * 8)
    assert_one_line(error, ["num_tokens=8", "seq_len=128"])


BAD_SETUPS = {
    "no axis of that name": ({"axes": MeshAxes(expert="model")}, ["'model'", "batch"]),
    "an axis without a role": (
        {"axes": MeshAxes(expert="ep")},
        ["'batch' (2 devices)", "MeshAxes(data='batch', expert='ep')"],
    ),
    "one axis, two roles": (
        {"axes": MeshAxes(data="ep", expert="ep")},
        ["'ep' has two roles"],
    ),
    "names that are no roles": (
        {"axes": None},
        ["'batch' (2 devices)", "no role", "MeshAxes(data='batch', expert='ep')"],
    ),
    "the policy of a run": ({"policy": "auto"}, ["policy='auto'", "for a run alone"]),
    "a batch that does not divide": (
        {"shape": (12, 8, 32)},
        ["12 sequences", "8 devices"],
    ),
    "no width": ({"shape": (16, 8)}, ["(batch, length, width)"]),
    "experts that do not divide": (
        {"moe": Moe(num_experts=6, d_expert=48)},
        ["num_experts=6", "(4)", "4 or 8"],
    ),
    "shared experts": (
        {"moe": Moe(num_experts=16, d_expert=48, num_shared_experts=1)},
        ["num_shared_experts=1", "your model"],
    ),
    "compression": (
        {"dispatch": Dispatch(domain=(1, 2), compression=8.0)},
        ["state of a training loop", "Dispatch.compression"],
    ),
    "dense training": (
        {"router": Router(training="dense")},
        ["Router.training='dense'", "use 'sparse'"],
    ),
    "no such split": (
        {"dispatch": Dispatch(split="waterfilling")},
        ["Dispatch.split='waterfilling'", "did you mean 'water_filling'"],
    ),
    "no such router": (
        {"router": Router(kind="sigmoyd")},
        ["Router.kind='sigmoyd'", "'sigmoid'"],
    ),
    "no such policy": ({"policy": "flexmoo"}, ["'flexmoo'", "'flexmoe'"]),
    "axes in another order": (
        {"mesh": "transposed", "dispatch": Dispatch(group="data_expert")},
        ["data x expert", "batch, ep", "('ep', 'batch')"],
    ),
    "an explicit axis that is cut": (
        {"mesh": "explicit", "dispatch": Dispatch(domain=(1, 2))},
        ["Explicit", "AxisType.Auto", "ep"],
    ),
}


@pytest.mark.parametrize("name", BAD_SETUPS)
def test_an_impossible_setup_is_refused_in_one_line(name):
    changes, words = BAD_SETUPS[name]
    meshes = {
        "transposed": make_mesh((4, 2), ("ep", "batch")),
        "explicit": make_mesh(kind=EXPLICIT),
    }
    mesh = meshes.get(changes.get("mesh"))
    with pytest.raises(ValueError) as error:
        set_up(**changes | {"mesh": mesh})
    assert_one_line(error, words)


def test_a_plan_needs_room_loads_and_every_expert():
    setup, tokens_lwe = set_up(), np.ones((1, 8, 16), int)
    tokens_lwe[..., 5] = 30
    plan = moejax.make_plan("flexmoe", tokens_lwe, set_up(policy="flexmoe"))
    assert (plan.slot_to_expert_lp == 5).sum() >= 2, "a hot expert has replicas"
    with pytest.raises(ValueError) as error:
        moejax.make_plan("flexmoe", tokens_lwe, setup)
    assert_one_line(error, ["'flexmoe'", "'owned'", "policy='flexmoe'"])
    with pytest.raises(ValueError) as error:
        moejax.make_plan("home", tokens_lwe[0], setup)
    assert_one_line(error, ["[layers, 8, 16]", "[8, 16]"])
    table = np.arange(16, dtype=np.int32)[None].copy()
    table[0, 3] = 0
    with pytest.raises(ValueError) as error:
        setup.place(ExpertPlan(table, 16))
    assert_one_line(error, ["layer 0", "experts [3]"])


def test_a_context_mesh_is_refused_if_the_layer_splits_its_axes():
    mesh = make_mesh()
    setup = set_up(mesh, dispatch=Dispatch(domain=(1, 2)))
    layer = MoeLayer(MOE, SHAPE[-1], nnx.Rngs(0))
    with jax.set_mesh(mesh), pytest.raises(ValueError) as error:
        layer(jnp.zeros(SHAPE), setup.place().layer(0), setup)
    assert_one_line(error, ["set_mesh", "ep_outer", "cut no axis"])


def assert_one_line(error, words) -> None:
    """Assert that an error's message is one line and contains all words."""
    text = str(error.value)
    assert "\n" not in text
    for word in words:
        assert word in text, text


PROBE = """
import sys
{block}
import jax, moejax
from flax import nnx
mesh = jax.make_mesh((8,), ("expert",), (jax.sharding.AxisType.Auto,))
moe = moejax.Moe(num_experts=8, d_expert=16)
setup = moejax.set_up(moe, mesh, (8, 4, 16), policy="flexmoe")
layer = moejax.shard(moejax.MoeLayer(moe, 16, nnx.Rngs(0)), setup)
run = jax.jit(moejax.moe_layer, static_argnames="setup")
placement = setup.place().layer(0)
y_btd, sums = run(layer.params(), jax.numpy.ones((8, 4, 16)), placement, setup)
plan = moejax.make_plan("flexmoe", sums.tokens_e[None], setup)
assert moejax.__file__.startswith(sys.prefix), moejax.__file__
assert not any(name.split(".")[0] in ("train", "gin") for name in sys.modules)
for name in moejax.__all__:
    getattr(moejax, name)
print(y_btd.shape, int(sums.tokens_e.sum()), plan.num_layers)
"""
BLOCK = """
class Undeclared:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {forbidden!r}:
            raise ModuleNotFoundError(f"{{name}} is no dependency of moejax")
sys.meta_path.insert(0, Undeclared())
"""


@pytest.mark.slow
def test_the_wheel_works_with_its_declared_dependencies_alone(repo, tmp_path):
    """The wheel works although all packages but its declared dependencies are
    hidden."""
    python, wheel = install(repo, tmp_path)
    here = os.path.dirname(os.path.dirname(np.__file__))
    site = next((tmp_path / "venv" / "lib").glob("python*")) / "site-packages"
    (site / "outside.pth").write_text(here + "\n")
    with zipfile.ZipFile(wheel) as files:
        files.extractall(site)
    allowed = dependencies(site)
    assert {"jax", "flax", "numpy", "jaxtyping"} <= allowed
    packages = importlib.metadata.packages_distributions()
    forbidden = {
        module
        for module, owners in packages.items()
        if not {canonical(owner) for owner in owners} & allowed
    }
    assert {"gin", "grain", "pyarrow", "tokenizers", "matplotlib"} <= forbidden
    probe(python, tmp_path, BLOCK.format(forbidden=forbidden - {"moejax"}))


def install(repo, folder):
    """Return the Python of a new environment, and the wheel of this checkout."""
    source = folder / "source"
    source.mkdir()
    for name in ("pyproject.toml", "README.md", "moejax", "train"):
        (source / name).symlink_to(repo / name)
    build = "import setuptools.build_meta as b; print(b.build_wheel('.'))"
    done = subprocess.run(
        [sys.executable, "-c", build], cwd=source, capture_output=True, text=True,
        check=True,
    )  # fmt: skip
    venv.create(folder / "venv")
    return folder / "venv" / "bin" / "python", source / done.stdout.split()[-1]


def probe(python, folder, block: str) -> None:
    """Run PROBE with this Python, outside the repository, and check what it prints."""
    env = dict(os.environ, PYTHONPATH="")
    done = subprocess.run(
        [python, "-c", PROBE.format(block=block)], cwd=folder, env=env,
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.stdout == "(8, 4, 16) 64 1\n", done.stderr[-2000:]


def dependencies(site) -> set[str]:
    """Return the distributions that the wheel's metadata requires, directly or through
    others."""
    meta = next(site.glob("moejax-*.dist-info/METADATA")).read_text()
    pending = re.findall(r"^Requires-Dist: ([\w.-]+)[^;\n]*$", meta, re.MULTILINE)
    names: set[str] = set()
    while pending:
        name = canonical(pending.pop())
        if name in names:
            continue
        names.add(name)
        try:
            requires = importlib.metadata.requires(name) or []
        except importlib.metadata.PackageNotFoundError:
            continue
        pending += [re.match(r"[\w.-]+", r)[0] for r in requires if "extra" not in r]
    return names


def canonical(name: str) -> str:
    """Return a distribution's name in its normalised form."""
    return re.sub(r"[-_.]+", "-", name).lower()
