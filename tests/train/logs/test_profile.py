"""Test the profiler's window of steps, and tools/read_profile.py, which reads its
trace."""

import gzip
import json
from functools import partial

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

from tools import read_profile
from train.logs.profile import Window, op_names, parse_steps


def test_steps_are_those_from_a_to_before_b():
    assert list(parse_steps("10:13")) == [10, 11, 12]
    assert list(parse_steps(" 1:2 ")) == [1]
    assert list(parse_steps("")) == []


@pytest.mark.parametrize(
    "text",
    ["10", ":3", "5:5", "0:3", "-1:3", "1:2:3", "１:３"],
)
def test_a_text_that_is_no_window_is_refused_in_one_line(text):
    with pytest.raises(ValueError, match="must be A:B with 1 <= A < B") as caught:
        parse_steps(text)
    assert "\n" not in str(caught.value)


@pytest.fixture(scope="module")
def step():
    """A compiled step that exchanges among eight devices in a named part."""
    mesh = jax.make_mesh((8,), ("expert",))

    @partial(jax.shard_map, mesh=mesh, in_specs=P("expert"), out_specs=P("expert"))
    def exchange(x_nd):
        with jax.named_scope("dispatch"):
            x_nd = jax.lax.all_to_all(x_nd, "expert", 0, 0, tiled=True)
        with jax.named_scope("experts"):
            return jnp.tanh(x_nd @ x_nd.T @ x_nd)

    x_nd = jax.device_put(jnp.ones((64, 8)), jax.NamedSharding(mesh, P("expert")))
    return jax.jit(exchange).lower(x_nd).compile(), x_nd


def run_steps(window, step, steps):
    """Run steps in a window, and return the numbers of the steps at its edges."""
    compiled, x_nd = step
    edges = []
    with window:
        for number in steps:
            window.before(number)
            x_nd = compiled(x_nd)
            edges += [number] * window.is_edge(number)
            window.after(number, x_nd)
    return edges


def test_trace_holds_the_steps_of_the_window_and_the_names_of_our_parts(step, tmp_path):
    messages = []
    window = Window(tmp_path, range(3, 5), messages.append, hlo_text=step[0].as_text)
    assert run_steps(window, step, range(1, 8)) == [2, 4]
    folder = tmp_path / "step-3-5"
    assert len(messages) == 1
    assert messages[0].startswith(f"profile of steps 3 to 4: {folder} ")
    assert sorted(path.name for path in folder.iterdir()) == [
        "op_names.json.gz",
        "perfetto_trace.json.gz",
        "plugins",
    ]
    assert len(list(folder.glob("plugins/profile/*/*.xplane.pb"))) == 1
    events, names = read_profile.read(folder)
    marks = [event for event in events if event.get("name") == "train_step"]
    assert sorted(int(mark["args"]["step_num"]) for mark in marks) == [3, 4]
    record = read_profile.summary(events, names)
    assert (record["num_steps"], record["num_devices"]) == (2, 8)
    # Per device and step: one exchange, and two products.
    assert record["kinds"]["all_to_all"]["num_ops"] == 1
    assert {"dispatch", "experts"} <= set(record["parts"])
    for rows in (record["kinds"], record["parts"]):
        assert all(row["busy_msec"] >= 0 for row in rows.values())


@pytest.mark.parametrize(
    ("window", "first", "last", "said"),
    [
        ("", 1, 3, None),
        ("30:50", 1, 3, "no profile: the run ended before step 30"),
        ("3:5", 5, 7, "no profile: steps 3:5 lie before step 5, "),
        ("3:6", 1, 4, "profile of steps 3 to 4: "),
        ("3:6", 4, 9, "profile of steps 4 to 5: "),
    ],
)
def test_a_run_says_which_steps_of_the_window_it_has(
    step, tmp_path, window, first, last, said
):
    messages = []
    steps = parse_steps(window)
    run_steps(Window(tmp_path, steps, messages.append), step, range(first, last + 1))
    assert [message.startswith(said) for message in messages] == [True] * bool(said)
    has_trace = (tmp_path / f"step-{window.replace(':', '-')}").exists()
    assert has_trace == bool(said and said.startswith("profile"))


def test_folder_that_cannot_be_written_costs_the_trace_and_not_the_run(step, tmp_path):
    (tmp_path / "profile").touch()
    messages = []
    window = Window(tmp_path / "profile", range(2, 4), messages.append)
    assert run_steps(window, step, range(1, 6)) == [1]
    assert len(messages) == 1
    assert messages[0].startswith("NO PROFILE of steps 2:4: ")
    assert messages[0].endswith("; training goes on")


def test_op_names_of_compiled_text():
    text = """
  %all-to-all.7 = f32[8]{0} all-to-all(%x), metadata={op_name="jit(f)/dispatch/a2a"}
  ROOT %dot.1 = f32[8,2]{1,0} dot(%y, %z), metadata={op_type="d" op_name="jit(f)/dot"}
  %plain = f32[] constant(0)
  %last = f32[] add(%plain, %plain), metadata={op_name="jit(f)/add"}
"""
    assert op_names(text) == {
        "all-to-all.7": "jit(f)/dispatch/a2a",
        "dot.1": "jit(f)/dot",
        "last": "jit(f)/add",
    }


def span(name, start, dur, is_op=True, thread=1):
    """Return an event of a trace."""
    args = {"args": {"hlo_op": name}} if is_op else {}
    return {"ph": "X", "pid": 1, "tid": thread, "name": name, "ts": start, "dur": dur,
            **args}  # fmt: skip


def test_self_times_leave_out_the_ops_within():
    spans = [
        span("while.1", 0, 100),
        span("ThunkExecutor::Execute", 5, 80, is_op=False),
        span("dot.1", 10, 30),
        span("all-to-all.1", 45, 35),
        span("Rendezvous", 50, 20, is_op=False),
        span("Wait: pending_threads=1/8", 52, 10, is_op=False),
        span("dot.2", 100, 7),
        span("dot.3", 20, 5, thread=2),
    ]
    times_by_op = {op["name"]: times for op, *times in read_profile.self_times(spans)}
    assert times_by_op == {
        "while.1": [35, 0],
        "dot.1": [30, 0],
        "all-to-all.1": [35, 20],
        "dot.2": [7, 0],
        "dot.3": [5, 0],
    }
    busy_usec = sum(busy for busy, _ in times_by_op.values())
    assert busy_usec == 107 + 5  # time that the two threads spent in ops


def test_kinds_of_ops():
    kinds = {
        "all-to-all-start.3 ncclDevKernel_SendRecv": "all_to_all",
        "all_gather.117": "all_gather", "reduce_scatter.72": "reduce_scatter",
        "all-reduce.2": "all_reduce", "dot_general.5": "dot", "ynn_fusion.46": "dot",
        "while.1889": "while", "bitcast_gather_fusion.3": "gather",
        "dynamic-slice_bitcast_fusion.12": "copy", "wrapped_compare.10": "fusion",
        "iota.1": "other",
    }  # fmt: skip
    assert {text: read_profile.operation_kind(text) for text in kinds} == kinds


def test_parts_of_forward_backward_and_later_rounds():
    path = "jit(f)/transpose(jvp())/while/body/shard_map/{}/all_to_all"
    assert (
        read_profile.layer_part(path.format("transpose(jvp(dispatch))")) == "dispatch"
    )
    later = path.format("later_rounds/jvp(experts)")
    assert read_profile.layer_part(later) == "later_rounds experts"
    assert read_profile.layer_part("jit(f)/dispatcher/add") == "other"
    assert read_profile.layer_part("state.params['embed_vd']") == "gathered"


def trace_of(**changes) -> bytes:
    """Return a trace with one span, whose fields are changed."""
    span = {"ph": "X", "name": "train_step", "pid": 1, "tid": 1, "ts": 0, "dur": 5}
    return json.dumps({"traceEvents": [span | changes]}).encode()


@pytest.mark.parametrize(
    "content",
    [
        None,
        b"",
        gzip.compress(b"no json", mtime=0),
        gzip.compress(b"[" * 10**5, mtime=0),
        gzip.compress(b'{"traceEvents": []}', mtime=0),
        gzip.compress(b'{"traceEvents": [1, {"ph": "X"}]}', mtime=0),
        gzip.compress(trace_of(ts=None), mtime=0),
        gzip.compress(trace_of(args={"hlo_op": []}), mtime=0),
        gzip.compress(trace_of(), mtime=0)[:-4],
        gzip.compress(trace_of(), mtime=0)[:-6] + bytes(6),
    ],
)
def test_a_file_that_is_no_trace_is_an_error_of_one_line(content, tmp_path, capsys):
    path = tmp_path / "perfetto_trace.json.gz"
    if content is not None:
        path.write_bytes(content)
    assert read_profile.main([str(tmp_path), "--json"]) == 2
    out, err = capsys.readouterr()
    assert err.startswith("error: ")
    assert str(tmp_path) in err
    assert err.count("\n") == 1
    assert json.loads(out)["exit_code"] == 2
