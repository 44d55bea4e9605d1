"""Test the benchmark of schedules and domains: bytes, layouts, and one tiny run."""

import json
import math
import os
from types import SimpleNamespace

import pytest

from moejax.perf.calibration import Calibration
from moejax.plan.layout import Topology
from tools.bench import communication, communication_cases, process_turns
from tools.bench.communication_cases import BenchedLayer, bytes_leaving, make_layout
from tools.bench.process_turns import time_runs
from tools.testbed import links

SHAPE = {
    "tokens": 32, "d_model": 64, "d_expert": 8, "num_experts": 8, "top_k": 2,
}  # fmt: skip
LINE = {"latency_sec": 1e-4, "bytes_per_sec": 1e7, "r2": 1.0}
KINDS = ("all_to_all", "all_gather", "reduce_scatter", "all_reduce")


def make_calibration(mesh: dict[str, int]) -> Calibration:
    """Return a calibration with the same line for all collectives of a mesh."""
    axes = [axis for axis, size in mesh.items() if size > 1]
    axes.append("_".join(axes))
    lines = {kind: dict.fromkeys(axes, LINE) for kind in KINDS}
    return Calibration("cpu", mesh, "float32", lines, 1e9, 1.0, 0.0, "now")


def instruction(kind: str, result: str, groups: str) -> str:
    return f"  %x = {result} {kind}(%y), channel_id=1, replica_groups={groups}, a=b"


@pytest.mark.parametrize(
    ("groups", "crossing"),
    [("{{0,2},{1,3}}", 2), ("{{0,1},{2,3}}", 0), ("{{0,1,2,3}}", 1),
     ("[2,2]<=[4]", 0), ("[2,2]<=[2,2]T(1,0)", 2), ("[1,4]<=[4]", 1),
     ("mesh['dc'=2,'expert'=2] {'dc'}", 2), ("mesh['dc'=2,'expert'=2] {'expert'}", 0),
     ("mesh['dc'=2,'expert'=2] {'dc','expert'}", 1)],
)  # fmt: skip
def test_bytes_that_rings_send_out_of_the_first_dc(groups, crossing):
    """Each DC has two devices. Every edge of a ring that leaves the DC carries (w - 1)
    of w parts."""
    w = 4 if crossing == 1 else 2
    share = crossing * (w - 1) / w
    gather = instruction("all-gather", "f32[8,4]{1,0}", groups)
    assert bytes_leaving(gather, 2) == 128 * share
    assert bytes_leaving(instruction("all-reduce", "s32[6]", groups), 2) == 48 * share
    scatter = instruction("reduce-scatter", "bf16[10]{0}", groups)
    assert bytes_leaving(scatter, 2) == 20 * w * share
    assert bytes_leaving("  %x = f32[8] add(%y, %z)", 2) == 0


def test_bytes_of_an_all_to_all_go_to_every_other_device():
    result = "(f32[4]{0}, f32[4]{0}, f32[4]{0}, f32[4]{0})"
    text = instruction("all-to-all", result, "{{0,1,2,3}}")
    assert bytes_leaving(text, 2) == 2 * 2 * 16  # two devices send a part to two
    assert bytes_leaving(text, 4) == 0


@pytest.mark.parametrize("variant", ["1x1", "2x1", "1x2", "2x2"])
def test_buffers_of_domains_are_the_even_share(variant):
    layout = make_layout(BenchedLayer(**SHAPE), variant, Topology(dc=2, expert=2))
    shared = math.prod(map(int, variant.split("x")))
    assert layout.rows_per_peer == 64 * shared // 4


@pytest.mark.parametrize("case", links.domain_cases())
def test_rows_and_experts_of_the_headline_have_the_sizes_of_their_names(case):
    shape, name = BenchedLayer(**case["shape"]), case["name"].replace("P_E=", "")
    rows, experts = map(float, name.removeprefix("D=").split())
    assert shape.row_bytes == rows * 2**20
    assert abs(shape.expert_bytes / 2**20 / experts - 1) < 0.04


@pytest.mark.parametrize("case", links.schedule_cases())
def test_full_buffers_of_the_headline_have_the_sizes_of_their_names(case):
    shape = BenchedLayer(**case["shape"])
    size, factor = case["name"].split(" MiB kf=")
    layout = make_layout(shape, "s2", Topology(expert=2, tensor=2))
    full = layout.rows_per_peer * layout.num_devices
    assert full * shape.d_model * 4 == int(size) * 2**20
    assert math.isclose(shape.top_k * shape.buffer_factor, float(factor))


def test_24_layers_are_different_and_their_variants_can_run():
    cases = links.layer_cases()
    assert len({json.dumps(case["shape"]) for case in cases}) == 24
    for case in cases:
        for variant in case["variants"]:
            make_layout(
                BenchedLayer(**case["shape"]), variant, Topology(expert=2, tensor=2)
            )


def test_figures_of_the_headline():
    def case(name, chosen, **step_sec):
        predicted = {variant: 1.0 for variant in step_sec if variant != "auto"}
        return {"name": name, "chosen": chosen, "step_sec": step_sec,
                "predicted_sec": predicted}  # fmt: skip

    record = {
        "cases": [
            case("D=8 P_E=0.25", "2x1", **{"1x1": 6.0, "2x1": 0.9, "auto": 1.0}),
            case("D=0.5 P_E=4", "1x1", **{"1x1": 0.9, "2x1": 5.0, "auto": 1.0}),
        ]
    }
    figures = links.domain_figures(record)
    assert (figures["domains_speedup"], figures["domains_worst"]) == (6.667, 1.0)
    assert list(figures["domains_again"].values()) == [1.111, 1.111]
    record = {
        "cases": [
            case("1 MiB kf=1.2", "s1h", base=1.0, s1=1.0, s2=1.0, s1h=1.0),
            case("4 MiB kf=1.2", "s1h", base=6.0, s1=2.0, s2=3.0, s1h=1.5),
            case("4 MiB kf=4.8", "s1h", base=6.0, s1=2.5, s2=3.0, s1h=1.0),
        ]
    }
    figures = links.schedule_figures(record)
    assert (figures["s1_speedup"], figures["s1h_speedup"]) == (2.4, 4.0)
    chosen = {"s1": (1.0, 1.1, 1.3), "s2": (2.0,)}
    record = {
        "cases": [
            case(f"{variant} {sec}", variant, s1=sec, s2=1.0 if sec > 1 else 1.2)
            for variant, times in chosen.items()
            for sec in times
        ]
    }
    figures = links.selector_figures(record)
    assert (figures["selector_right"], figures["selector_fastest"]) == (0.75, 0.5)


@pytest.mark.slow
def test_a_tiny_run(tmp_path, capfd, monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", os.environ["XLA_FLAGS"])  # start() adds to them
    mesh = {"dc": 2, "data": 1, "expert": 4, "tensor": 1}
    monkeypatch.setattr(communication, "calibrate", lambda *_: make_calibration(mesh))
    path = tmp_path / "cases.json"
    case = {"name": "tiny", "shape": SHAPE, "variants": ["1x1", "2x4"]}
    path.write_text(json.dumps([case]))
    words = ["--mesh=dc=2,expert=4", f"--cases={path}", "--turns=2", "--json"]
    assert communication.main(words) == 0
    (record,) = json.loads(capfd.readouterr().out.splitlines()[-1])["cases"]
    assert list(record["step_sec"]) == ["1x1", "2x4", "auto"]
    assert min(record["step_sec"].values()) > 0
    predicted_sec, expected_bytes = record["predicted_sec"], record["expected_bytes"]
    assert record["chosen"] == min(predicted_sec, key=predicted_sec.get)
    assert expected_bytes["auto"] == expected_bytes[record["chosen"]]
    rows_bytes = 4 * 4 * 32 * 2 * 64 * 4 / 2  # 4 times half of the rows of 4 devices
    assert rows_bytes < expected_bytes["1x1"] < 1.5 * rows_bytes


def test_times_are_of_the_right_run_whatever_the_order(monkeypatch):
    """The clock goes on in the runs alone, and each run has a time of its own."""
    now_sec, expected = [0.0], (0.5, 0.125, 0.25)

    def run_for(sec: float) -> None:
        now_sec[0] += sec

    clock = SimpleNamespace(perf_counter=lambda: now_sec[0])
    monkeypatch.setattr(process_turns, "time", clock)
    runs = [lambda sec=sec: run_for(sec) for sec in expected]
    assert time_runs(runs, 3, lambda: None) == [[sec] * 3 for sec in expected]


@pytest.mark.parametrize(
    ("cases", "what"),
    [
        ("not JSON", "as JSON"),
        ("[]", "holds none"),
        ('[{"name": "a"}]', "a case must have"),
        (None, "cannot read"),
    ],
)
def test_bad_cases_are_one_line(tmp_path, capsys, cases, what):
    path = tmp_path / "cases.json"
    if cases is not None:
        path.write_text(cases)
    assert communication.main(["--mesh=expert=2", f"--cases={path}"]) == 2
    err = capsys.readouterr().err
    assert what in err
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("variant", "change", "topology", "what"),
    [
        ("s4", {}, Topology(expert=2), "'s4' is not a variant"),
        ("2x1", {}, Topology(dc=2, tensor=2), "is a domain, but Mesh.tensor=2"),
        ("3x1", {}, Topology(dc=2, expert=2), "must have a divisor"),
        ("s1", {}, Topology(expert=2), "Mesh.tensor"),
    ],
)
def test_impossible_variants_are_refused(variant, change, topology, what):
    with pytest.raises(ValueError, match=what):
        make_layout(BenchedLayer(**SHAPE | change), variant, topology)


@pytest.mark.parametrize(
    ("change", "what"),
    [({"tokens": 0}, "tokens=0"), ({"top_k": 9}, "top_k=9"),
     ({"buffer_factor": 0.5}, "buffer_factor=0.5")],
)  # fmt: skip
def test_impossible_shapes_are_refused(change, what):
    with pytest.raises(ValueError, match=what):
        BenchedLayer(**SHAPE | change)


def test_variants_that_a_model_does_not_know_are_refused():
    mesh = {"dc": 1, "data": 1, "expert": 1, "tensor": 2}
    topology, lines = Topology(tensor=2), make_calibration(mesh)
    odd = BenchedLayer(**SHAPE | {"tokens": 33})
    with pytest.raises(ValueError, match=r"\['s1'\] cannot run"):
        communication_cases.predict_variants(odd, ["base", "s1"], topology, lines)
