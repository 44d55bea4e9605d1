"""cuDNN's attention over packed documents: its tables and calls, without a GPU.

The kernels run on no machine of these tests. A definition of what cuDNN documents about
them (tests/support/packed_attention.py) takes their place.
"""

import functools
import inspect
import json
import re
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.cudnn import fused_attention_stablehlo as fused
from jax.sharding import AbstractDevice, AbstractMesh, PartitionSpec, use_abstract_mesh

from moejax.choice import Choice
from moejax.kernels.attention import Rule, attention, cudnn
from moejax.kernels.attention.choose import choose_attention
from moejax.kernels.attention.reading import Inputs
from tests.support import packed_attention
from tests.support.close import assert_close

READ_FOR = "0.11.2"
PRIMITIVES = {
    "forward": "_dot_product_attention_fwd_p",
    "backward": "_dot_product_attention_bwd_p",
}
TOKENS, HEADS, GROUPS, WIDTH = 20, 4, 2, 8
GPU = AbstractDevice("NVIDIA B200", num_cores=148, platform="gpu")
ROWS = {
    "one document": [20],
    "documents of length 1 at both ends": [1, 18, 1],
    "as many as there are places": [3, 8, 4, 5],
}
MANY = {"one more": [3, 8, 4, 4, 1], "documents of length 1": [1] * 20}


def first(*rows: list[int]) -> np.ndarray:
    """Return the first token of each token's document, from documents' lengths."""
    begins = [np.cumsum([0, *lengths[:-1]]) for lengths in rows]
    pairs = zip(begins, rows, strict=True)
    return np.stack([np.repeat(begin, n) for begin, n in pairs]).astype(np.int32)


def shapes(b=1, t=TOKENS, h=HEADS, g=GROUPS, i=WIDTH, dtype=jnp.bfloat16, **changes):
    """Return inputs without values; `changes` are other u, j and v_dtype."""
    u, j = changes.get("u", t), changes.get("j", i)
    array = jax.ShapeDtypeStruct
    return Inputs(
        array((b, t, h, i), dtype),
        array((b, u, g, i), dtype),
        array((b, u, g, j), changes.get("v_dtype", dtype)),
        array((b, t), jnp.int32),
        array((), jnp.int32),
    )


@pytest.fixture
def on_gpu(monkeypatch):
    monkeypatch.setattr(cudnn, "device_here", lambda: GPU)


@pytest.fixture
def few_places(monkeypatch):
    monkeypatch.setattr(cudnn, "MAX_DOCUMENTS", 4)


def test_the_private_module_is_that_of_this_version_of_jax():
    """After an update of JAX, compare with what cudnn.py says: operands and parameters
    of the two primitives, shapes of the logarithms and of offsets, the checks; then
    write the new version here."""
    assert jax.__version__ == READ_FOR, "read jax._src.cudnn again: see this docstring"
    operands = (
        "query, key, value, bias, q_seqlen, kv_seqlen, q_offsets, kv_offsets, "
        "page_table_k, page_table_v"
    )
    rest = "scale, seed, dropout_rate, variadic_args, mask_type, layout"
    for evaluate, more, last in (
        (fused._dot_product_attention_fwd_abstract, "", ", is_training"),
        (
            fused._dot_product_attention_bwd_abstract,
            ", activation, fwd_output, grad_output",
            "",
        ),
    ):
        parameters = ", ".join(inspect.signature(evaluate).parameters)
        assert parameters == f"{operands}{more}, {rest}, sliding_window_length{last}"
    checks = inspect.signature(fused.check_is_flash_attention).parameters
    assert {"has_bias", "is_training", "is_packed"} < set(checks)


@pytest.mark.parametrize("lengths", ROWS.values(), ids=ROWS)
def test_operands_are_those_that_jax_makes_of_its_own_tables(few_places, lengths):
    absent = [-1] * (4 - len(lengths))
    length_1m = jnp.asarray([[*lengths, *absent]])
    offset_1n = jnp.asarray([[*np.cumsum([0, *lengths[:-1]]), *absent, -1]])

    @jax.jit
    def both(q, k, v, begin_n, length_1m, offset_1n):
        row = shapes()._replace(q_bthi=q, k_bugi=k, v_bugj=v)
        tables = length_1m, length_1m, offset_1n, offset_1n
        operands = cudnn._operands(row, begin_n)
        return operands[4:8], fused._fix_seqlen_offsets(*tables, q, k)

    arrays = [jnp.zeros(a.shape, a.dtype) for a in shapes()[:3]]
    row = shapes()._replace(first_bt=jnp.asarray(first(lengths)))
    begin_n = cudnn.documents_of(row).begin_n
    ours, theirs = both(*arrays, begin_n, length_1m, offset_1n)
    assert [a.tolist() for a in ours] == [a.tolist() for a in theirs]


def test_values_and_gradients_are_those_of_the_definition(
    few_places, on_gpu, monkeypatch
):
    """With few documents in each row, and with more than there are places in one."""
    for name in ("forward", "backward"):
        primitive = SimpleNamespace(bind=getattr(packed_attention, name))
        monkeypatch.setattr(fused, PRIMITIVES[name], primitive)
    rng = np.random.default_rng(0)
    sizes = [(3, TOKENS, n, WIDTH) for n in (HEADS, GROUPS, GROUPS, HEADS)]
    q, k, v, dout = (jnp.asarray(rng.normal(size=s), jnp.bfloat16) for s in sizes)
    sinks_h = jnp.asarray(rng.normal(size=HEADS), jnp.float32)

    @functools.partial(jax.jit, static_argnums=0)
    def results(implementation, first_bt):
        call = lambda q, k, v, sinks_h: attention(  # noqa: E731
            q, k, v, first_bt,
            rule=Rule(window=6), sinks_h=sinks_h, implementation=implementation,
        )  # fmt: skip
        out, pull = jax.vjp(call, q, k, v, sinks_h)
        return out, pull(dout)

    for rows in ([*ROWS.values()], [ROWS["one document"], *MANY.values()]):
        pair = [results(name, first(*rows)) for name in ("cudnn", "reference")]
        assert_close(*pair, dtype=jnp.bfloat16)


@pytest.mark.parametrize(
    ("rule", "options"),
    [
        (Rule(), ("PADDING_CAUSAL", 0, WIDTH**-0.5)),
        (Rule(window=7, scale=0.25), ("PADDING_CAUSAL", 7, 0.25)),
        (Rule(is_causal=False, scale=0.5), ("PADDING", 0, 0.5)),
    ],
)
def test_both_calls_have_the_rules_options(few_places, rule, options):
    calls = lowered_calls(shapes(b=3), rule)
    assert list(calls) == ["__cudnn$fmhaSoftmax", "__cudnn$fmhaSoftmaxBackward"]
    for config in calls.values():
        names = ("mask_type", "sliding_window_length", "fmha_scale")
        assert tuple(config[name] for name in names) == options
        assert config["max_seg_per_batch"] == 4
        dims = config["intermediate_tensor_shape"]["dimensions"]
        assert [int(size) for size in dims] == [1, HEADS, TOKENS, TOKENS]


def test_inside_shard_map_each_device_calls_it_for_its_own_rows_and_heads():
    mesh = AbstractMesh(
        (2, 2),
        ("data", "tensor"),
        axis_types=(jax.sharding.AxisType.Auto,) * 2,
        abstract_device=GPU,
    )
    calls = lowered_calls(shapes(b=4), Rule(), mesh)
    assert len(calls) == 2
    for config in calls.values():
        dims = config["intermediate_tensor_shape"]["dimensions"]
        assert [int(size) for size in dims] == [1, HEADS // 2, TOKENS, TOKENS]


@pytest.mark.parametrize(
    ("inputs", "rule", "why"),
    [
        (shapes(dtype=jnp.float32), Rule(), "bfloat16 or float16, not float32"),
        (shapes(v_dtype=jnp.float16), Rule(), "not bfloat16 and float16"),
        (shapes(), Rule(soft_cap=5.0), "no soft cap"),
        (shapes(u=32), Rule(), "20 queries and 32 keys are no whole windows"),
        (shapes(i=136), Rule(), "queries 136 wide .* multiple of 8 up to 128"),
        (shapes(i=20), Rule(), "queries 20 wide .* multiple of 8 up to 128"),
        (shapes(j=16), Rule(), "queries 8 wide and values 16 wide"),
        (shapes(t=2**18, h=32, i=128), Rule(), "two documents .* need 16.0 GiB"),
    ],
)
def test_what_cudnn_has_not_is_declined_with_a_reason(inputs, rule, why, on_gpu):
    assert re.search(why, cudnn.declines(inputs, rule))


def test_auto_takes_cudnn_on_gpus_and_blocks_where_it_declines():
    with use_abstract_mesh(AbstractMesh((), (), abstract_device=GPU)):
        taken = choose_attention(shapes(), Rule())
        declined = choose_attention(shapes(), Rule(soft_cap=5.0))
    assert taken == Choice("cudnn", "NVIDIA B200")
    reason = "cuDNN declines: it has no soft cap of scores"
    assert declined == Choice("blocked", reason)


@pytest.mark.parametrize(
    ("device", "i", "why"), [(GPU, 20, "queries 20 wide"), (None, 8, "not cpu")]
)
def test_an_implementation_that_was_named_raises_the_reason(device, i, why):
    call = functools.partial(attention, implementation="cudnn")
    mesh = AbstractMesh((), (), abstract_device=device)
    with use_abstract_mesh(mesh), pytest.raises(NotImplementedError, match=why):
        jax.eval_shape(call, *shapes(i=i)[:4])


@pytest.mark.parametrize(
    ("capability", "version", "why"),
    [
        ("10.0", 92800, None),
        ("9.0", 90600, None),
        ("8.0", 92800, "at least Hopper"),
        ("9.0", 90501, "version 9.5.1 "),
        ("10.0", 91001, "version 9.10.1 "),
        ("10.3", 91000, "10.3 requires cuDNN version >= 9.11"),
    ],
)
def test_the_device_is_asked_where_it_is_here(
    monkeypatch, on_gpu, capability, version, why
):
    parse = lambda text: tuple(map(int, text.split(".")))  # noqa: E731
    has = {
        "check_cudnn_version": lambda: version,
        "check_compute_capability": lambda asked: parse(capability) >= parse(asked),
        "is_cuda_compute_capability_equal": lambda asked: capability == asked,
    }
    for name, answer in has.items():
        monkeypatch.setattr(fused, name, answer)
    assert cudnn.declines(shapes(), Rule()) is None  # no GPU is here
    monkeypatch.setattr(cudnn, "is_here", lambda: True)
    found = cudnn.declines(shapes(), Rule())
    assert found is why is None or why in found


@pytest.mark.parametrize(
    ("sizes", "places"),
    [
        ({"t": 4096, "h": 32, "g": 4, "i": 128}, 32),
        ({"t": 32768, "h": 32, "g": 4, "i": 128}, 4),
        ({"t": 32768, "h": 32, "g": 32, "i": 128}, 8),
        ({"t": 4096, "h": 4, "g": 4, "i": 64}, 64),
    ],
)
def test_documents_have_places_within_the_workspace(sizes, places):
    assert cudnn.max_documents(shapes(**sizes)) == places


def lowered_calls(inputs: Inputs, rule: Rule, mesh: AbstractMesh | None = None) -> dict:
    """Return the configurations of cuDNN's calls by their names, for a value and its
    gradients lowered for CUDA; split over rows and heads where there is a mesh."""
    run = functools.partial(attention, rule=rule, implementation="cudnn")
    if mesh is not None:
        arrays = (PartitionSpec("data", None, "tensor"),) * 3
        specs = {"in_specs": (*arrays, PartitionSpec("data")), "out_specs": arrays[0]}
        run = jax.shard_map(run, mesh=mesh, **specs)

    def loss(q, k, v, first_bt):
        return jnp.sum(run(q, k, v, first_bt).astype(jnp.float32))

    with use_abstract_mesh(mesh or AbstractMesh((), (), abstract_device=GPU)):
        traced = jax.jit(jax.value_and_grad(loss, (0, 1, 2))).trace(*inputs[:4])
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
    found = re.findall(r'custom_call @(__cudnn\S+)\(.*?backend_config = "(.*?)"', text)
    return {
        name: json.loads(config.replace("\\22", '"'))["cudnn_fmha_backend_config"]
        for name, config in found
    }
