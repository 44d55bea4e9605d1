"""Test tools/replay.py: figures of policies and splits, loads, and bad input."""

import json
import subprocess
import sys

import numpy as np
import pytest

from moejax.balance.policies import POLICIES
from moejax.config import Balance, Config, Model, Moe
from moejax.perf.cost_model import NOTES
from moejax.plan.layout import Topology
from moejax.resolve.speeds import load_calibration, make_cost_model
from tests.support.close import assert_close
from tests.support.run_folders import write_checkpoint_record
from tools import replay
from tools.bench import expert_loads

DEVICES, EXPERTS = 4, 8
FIELDS = {
    "device_max_over_mean_p50", "device_max_over_mean_p90",
    "device_max_over_mean_max", "modelled_layer_msec", "speedup", "moves", "changes",
    "plan_msec",
}  # fmt: skip


def counts(num_samples: int = 6, num_layers: int = 2) -> np.ndarray:
    """Return skewed counts [samples, layers, devices, experts]. Another expert is hot
    in the last two samples."""
    rng = np.random.default_rng(0)
    chance_e = np.arange(1.0, EXPERTS + 1) ** -1.5
    shape = (num_samples, num_layers, DEVICES)
    table = rng.multinomial(40_000, chance_e / chance_e.sum(), size=shape)
    table[-2:] = table[-2:, ..., ::-1]
    return table.astype(np.uint16)


def write(path, tokens=None, **arrays):
    np.savez(path, tokens=counts() if tokens is None else tokens, **arrays)
    return path


def run_replay(capsys, *words) -> dict:
    """Run the tool with --json, and return its record."""
    assert replay.main([*map(str, words), "--json"]) == 0
    return json.loads(capsys.readouterr().out.splitlines()[-1])


def trace_words(path) -> list:
    return ["--trace", path, "--devices", DEVICES]


def test_figures_of_home_are_those_of_the_definition(tmp_path, capsys):
    """A layer takes its products thrice, four exchanges of rows and two of cards, which
    have 8 bytes a row."""
    path = write(tmp_path / "a.npz", layer=np.array([3, 9]))
    record = run_replay(capsys, *trace_words(path), "--policies", "home")
    tokens = counts().astype(float)[1:]
    device_nlw = tokens.sum(axis=2).reshape(5, 2, DEVICES, -1).sum(axis=-1)
    ratio_nl = device_nlw.max(axis=-1) / device_nlw.mean(axis=-1)
    pair_nlww = tokens.reshape(5, 2, DEVICES, DEVICES, -1).sum(axis=-1)
    others_nlww = pair_nlww * (1 - np.eye(DEVICES))
    sent_nl, taken_nl = (others_nlww.sum(axis=x).max(axis=-1) for x in (3, 2))
    products_nl = device_nlw.max(axis=-1) * NOTES.flops_per_row / NOTES.flops_per_sec
    rows_nl = np.maximum(sent_nl, taken_nl)
    row_bytes = 4 * NOTES.bytes_per_row + 2 * 8
    exchange_nl = rows_nl * row_bytes / NOTES.bytes_per_sec
    msec_nl = 1e3 * (3 * products_nl + exchange_nl)
    home = record["policies"]["home"]
    assert set(home) == {"3", "9", "all"}
    for index, name in enumerate(("3", "9")):
        assert set(home[name]) == FIELDS
        ratio_n, msec_n = ratio_nl[:, index], msec_nl[:, index]
        for field, expected in (
            ("device_max_over_mean_p50", np.median(ratio_n)),
            ("device_max_over_mean_p90", np.percentile(ratio_n, 90)),
            ("device_max_over_mean_max", ratio_n.max()),
            ("modelled_layer_msec", np.median(msec_n)),
        ):
            assert np.isclose(home[name][field], expected), field
    assert np.isclose(home["all"]["device_max_over_mean_max"], ratio_nl.max())
    assert (home["all"]["moves"], home["all"]["speedup"]) == (0, 1)


def test_all_policies_on_loads_that_stay(tmp_path, capsys):
    """All samples are equal, so no policy is worse than home, no plan changes after the
    first, and --same gives the same figures."""
    path = write(tmp_path / "a.npz", np.repeat(counts(1), 5, axis=0))
    words = [*trace_words(path), "--policies", "all"]
    policies = run_replay(capsys, *words)["policies"]
    assert list(policies) == list(POLICIES)
    same = run_replay(capsys, *words, "--same")["policies"]
    for name, parts in policies.items():
        assert parts["all"]["speedup"] >= 1 - 1e-9, name
        assert parts["all"]["moves"] == 0, name
        for field in FIELDS - {"plan_msec", "speedup"}:
            assert np.isclose(parts["all"][field], same[name]["all"][field]), name
    for name in ("fastermoe", "prophet", "flexmoe", "eplb", "micromoe"):
        ratio = policies[name]["all"]["device_max_over_mean_p50"]
        assert ratio < policies["home"]["all"]["device_max_over_mean_p50"], name


def test_next_sample_is_what_a_plan_is_scored_on(tmp_path, capsys):
    """Another expert becomes hot between samples 3 and 4. A plan made before meets the
    new load only if it is scored on the next sample."""
    words = [*trace_words(write(tmp_path / "a.npz")), "--policies", "eplb"]
    after = run_replay(capsys, *words)["policies"]["eplb"]["all"]
    same = run_replay(capsys, *words, "--same")["policies"]["eplb"]["all"]
    assert after["device_max_over_mean_max"] > 1.5 * same["device_max_over_mean_max"]
    assert after["changes"] > 0
    assert after["moves"] > 0
    strided = run_replay(capsys, *words, "--stride", 2)  # plans from 0, 2, 4
    assert strided["num_samples"] == 3
    ratio = strided["policies"]["eplb"]["all"]["device_max_over_mean_max"]
    assert ratio < after["device_max_over_mean_max"]


def test_split_is_the_policys_own_or_the_one_given(tmp_path, capsys):
    """Under the same plan, an exact split gives the fullest device fewer rows than the
    even split."""
    words = [*trace_words(write(tmp_path / "a.npz")), "--policies"]
    records = {"policy": run_replay(capsys, *words, "eplb")}
    for split in ("even", "water_filling"):
        records[split] = run_replay(capsys, *words, "eplb,home", "--split", split)
    assert [record["split"] for record in records.values()] == list(records)
    for part in ("0", "1", "all"):
        own, even, filled = (r["policies"]["eplb"][part] for r in records.values())
        for field in FIELDS - {"plan_msec"}:
            assert even[field] == own[field]
        assert filled["device_max_over_mean_p50"] < even["device_max_over_mean_p50"]
        assert filled["device_max_over_mean_max"] < even["device_max_over_mean_max"]
        assert (filled["moves"], filled["changes"]) == (even["moves"], even["changes"])
    # With one replica of each expert there is nothing to split.
    assert records["water_filling"]["policies"]["home"]["all"]["speedup"] == 1


def test_dynamic_split_evens_out_what_no_plan_foresaw(tmp_path, capsys):
    """Each source has 40,000 rows, so each device has as many, whatever is hot."""
    words = [*trace_words(write(tmp_path / "a.npz")), "--split", "dynamic"]
    parts = run_replay(capsys, *words, "--policies", "home")["policies"]["home"]
    worst = max(part["device_max_over_mean_max"] for part in parts.values())
    assert worst < 1 + 1 / 40_000
    assert parts["all"]["speedup"] > 1


def test_slots_and_shadows_of_a_layout():
    args = replay.parse(
        ["--synthetic", "uniform", "--devices=4", "--slots=5", "--shadows=3"]
    )
    slots = {
        name: replay.layout_for(policy, EXPERTS, args).slots_per_device
        for name, policy in POLICIES.items()
    }
    assert slots == {
        "home": 2, "smartmoe": 2, "hiermoe": 2, "fastermoe": 5, "prophet": 5,
        "flexmoe": 5, "eplb": 5, "laer": 5, "micromoe": 5,
    }  # fmt: skip
    dynamic = replay.layout_for(POLICIES["home"], EXPERTS, args, "dynamic")
    assert dynamic.slots_per_device == 4  # the own experts, and as many copies
    assert (dynamic.offers_per_device, dynamic.copies_per_device) == (2, 2)


def test_micro_batches_are_summed(tmp_path):
    tokens = counts(4).astype(np.uint16)
    path = write(tmp_path / "a.npz", np.stack([tokens, tokens], axis=2))
    load_tlwe = expert_loads.read_trace(path).load_tlwe
    assert np.array_equal(load_tlwe, 2.0 * tokens)


@pytest.mark.parametrize(
    ("kind", "share"),
    [("uniform", 1 / 8), ("zipf:1.0", 1 / 2.717857), ("one_hot", 1), ("burst:0.7", 0.7),
     ("rotating:0.6", 0.6)],
)  # fmt: skip
def test_synthetic_loads_have_their_hottest_expert(kind, share):
    load_tlwe = expert_loads.synthetic(kind, DEVICES, EXPERTS, 20).load_tlwe
    assert np.all(load_tlwe.sum(axis=-1) == expert_loads.ROWS_PER_DEVICE)
    hottest = load_tlwe[0].sum(axis=1).max(axis=-1) / load_tlwe[0].sum(axis=(1, 2))
    assert np.all(np.abs(hottest - share) < 0.02)  # chance, of 65,536 rows
    hot_tl = load_tlwe.sum(axis=2).argmax(axis=-1)
    assert np.any(hot_tl[0] != hot_tl[-1]) == kind.startswith(("uni", "burst", "rot"))


def test_a_calibration_sets_the_times(tmp_path, capsys):
    def calibration(flops_per_sec):
        line = {"latency_sec": 1e-5, "bytes_per_sec": 1e9, "r2": 1.0}
        mesh = {"dc": 1, "data": 1, "expert": DEVICES, "tensor": 1}
        record = {
            "device_kind": "cpu", "mesh": mesh, "compute_dtype": "float32",
            "collectives": {"all_to_all": {"expert": line}}, "matmul_r2": 1.0,
            "flops_per_sec": flops_per_sec, "compile_sec": 0.0, "when": "2026-01-01",
        }  # fmt: skip
        path = tmp_path / f"{flops_per_sec}.json"
        path.write_text(json.dumps(record))
        return path

    words = [*trace_words(write(tmp_path / "a.npz")), "--policies", "home"]
    slow, fast = (
        run_replay(capsys, *words, "--calibration", calibration(flops))["policies"]
        for flops in (1e9, 1e12)
    )
    assert (
        slow["home"]["all"]["modelled_layer_msec"]
        > 10 * fast["home"]["all"]["modelled_layer_msec"]
    )
    words = ["--synthetic", "uniform", "--devices", "8", "--json", "--calibration"]
    assert replay.main([*words, str(calibration(1e9))]) == 2
    assert "mesh" in json.loads(capsys.readouterr().out)["error"]


@pytest.mark.parametrize(
    ("words", "what"),
    [
        (["--devices=8"], "leave --devices out"),
        (["--trace={tmp}/none.npz"], "none.npz"),
        (["--experts=16"], "has 8 experts"),
        (["--policies=flexmo"], "flexmoe"),
        (["--policies=eplb", "--slots=1"], "raise slots_per_device to at least 2"),
        (["--layers=5"], "no layer '5'"),
        (["--array=counts"], "holds tokens"),
        (["--stride=0"], "--stride 0"),
        (["--split=dynamic"], "fastermoe, prophet, flexmoe"),
        (["--split=dynamic", "--policies=home,eplb"], "eplb would plan them too"),
        (["--calibration=none.json"], "none.json"),
    ],
)
def test_bad_options_are_one_line(tmp_path, capsys, words, what):
    path = write(tmp_path / "a.npz")
    words = [word.format(tmp=tmp_path) for word in words]
    code = replay.main(["--trace", str(path), "--devices=4", "--json", *words])
    refused(code, capsys, what)


@pytest.mark.parametrize(
    ("tokens", "what"),
    [
        (np.ones((4, 2, 8)), "[4, 2, 8]"),
        (np.ones((4, 2, 4, 6)), "num_experts=6"),
        (np.ones((1, 2, 4, 8)), "--same"),
        (-np.ones((4, 2, 4, 8)), "negative"),
        (np.full((4, 2, 4, 8), "x"), "<U1"),
        (np.zeros((0, 2, 4, 8)), "[0, 2, 4, 8]"),
    ],
)
def test_traces_of_another_shape_are_one_line(tmp_path, capsys, tokens, what):
    path = write(tmp_path / "a.npz", tokens)
    code = replay.main(["--trace", str(path), "--devices=4", "--json"])
    refused(code, capsys, what)


@pytest.mark.parametrize("kind", ["zip:1", "one_hot:2", "zipf:x", "burst:1.5"])
def test_unknown_synthetic_loads_are_one_line(capsys, kind):
    refused(replay.main(["--synthetic", kind, "--json"]), capsys, kind)


def refused(code: int, capsys, what: str) -> None:
    out, err = capsys.readouterr()
    assert code == 2
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert what in err
    assert json.loads(out.splitlines()[-1])["exit_code"] == 2


def test_program_runs_from_anywhere_without_jax(repo, tmp_path):
    program = (
        f"import sys; sys.argv = ['x', '--synthetic', 'zipf', '--samples=3', "
        f"'--by_layer']; sys.path.insert(0, {str(repo)!r})\n"
        "from tools import replay\n"
        "assert replay.main() == 0 and 'jax' not in sys.modules"
    )
    run = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    assert "layer 1" in run.stdout
    assert all(name in run.stdout for name in POLICIES)


def test_the_loads_and_the_sizes_of_a_run(tmp_path, capsys):
    """The figures are those of a trace with the same loads, and times are those of the
    run's own cost model."""
    cfg = Config(
        model=Model(d_model=32), moe=Moe(num_experts=EXPERTS, d_expert=48),
        mesh=Topology(expert=DEVICES), balance=Balance(policy="flexmoe"),
    )  # fmt: skip
    run = tmp_path / "run"
    write_checkpoint_record(run, 9, {"config": cfg.to_dict()})
    write_loads(run, counts())
    words = ["--policies", "home,eplb"]
    of_run = run_replay(capsys, "--run", run, *words)
    of_trace = run_replay(capsys, "--trace", write(tmp_path / "a.npz"), *words)
    assert of_run["slots"] == EXPERTS // DEVICES + 1
    for name in ("home", "eplb"):
        for field in ("device_max_over_mean_p50", "device_max_over_mean_max", "moves"):
            ours, theirs = (r["policies"][name]["all"] for r in (of_run, of_trace))
            assert ours[field] == theirs[field]
    args = replay.parse(["--synthetic", "uniform", f"--devices={DEVICES}"])
    cost = make_cost_model(cfg, load_calibration(cfg))
    layout = replay.layout_for(POLICIES["home"], EXPERTS, args)
    sec_tl = [
        [cost.layer_sec(load_we, np.arange(EXPERTS), layout) for load_we in load_lwe]
        for load_lwe in counts()[1:].astype(float)
    ]
    expected = 1e3 * float(np.median(np.mean(sec_tl, axis=1)))
    assert_close(of_run["policies"]["home"]["all"]["modelled_layer_msec"], expected)


@pytest.mark.parametrize(
    ("tables", "what"),
    [
        ([], "Train.log_sources"),
        ([counts()[0], counts()[0, :1]], "of one shape"),
        ([-counts()[0].astype(int)], "negative numbers"),
        (counts(), "no complete checkpoint"),
    ],
)
def test_loads_of_a_run_that_cannot_be_replayed(tmp_path, capsys, tables, what):
    write_loads(tmp_path, tables)
    refused(replay.main(["--run", str(tmp_path), "--json"]), capsys, what)


def write_loads(folder, tables) -> None:
    """Write the loads of a run, one line for each table."""
    lines = [
        json.dumps({"step": step, "load_lwe": load_lwe.tolist()})
        for step, load_lwe in enumerate(tables)
    ]
    (folder / "loads.jsonl").write_text("".join(f"{line}\n" for line in lines))
