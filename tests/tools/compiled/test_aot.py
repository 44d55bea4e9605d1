"""A toy with the structure of the GPU configurations, compiled for H100s that are not
here; and the bad inputs of tools/aot.py."""

import itertools

import pytest

from moejax.perf.target import FOLDER
from tests.support.aot import ROOT, TOY, run_aot
from tools import aot
from tools.compiled import wheels
from tools.compiled.memory import KINDS, NUM_LARGEST
from train.config import gin_reader

GIB = 2**30
TARGET = ["--target=h100", "--devices=8"]


@pytest.fixture(scope="module")
def toy(tmp_path_factory) -> tuple[str, dict, str]:
    """The text, the record and the page of the toy."""
    page = tmp_path_factory.mktemp("aot") / "toy.html"
    text, record = run_aot(f"--gin_file={TOY}", *TARGET, f"--html={page}")
    return text, record, page.read_text()


@pytest.mark.slow
@pytest.mark.aot
def test_kinds_of_memory_add_up_to_the_peak(toy):
    _, record, _ = toy
    by_kind = record["memory_gib"]
    assert list(by_kind) == list(KINDS)
    assert sum(by_kind.values()) == pytest.approx(record["peak_gib"])
    assert all(size > 0 for size in by_kind.values())
    assert record["fits"]
    assert not record["warnings"]


@pytest.mark.slow
@pytest.mark.aot
def test_masters_and_moments_are_those_of_the_state(toy):
    """The dry run counts the same arrays without a compiler. XLA pads each to 256
    bytes at most."""
    from train.dry_run import dry_run

    _, record, _ = toy
    predicted = dry_run(gin_reader.load([TOY]), None)["memory"]
    slack = 64 * 256 / GIB
    for kind in ("masters", "moments"):
        size = predicted[kind] / GIB
        assert record["memory_gib"][kind] == pytest.approx(size, abs=slack)


@pytest.mark.slow
@pytest.mark.aot
def test_little_of_the_peak_has_no_kind_and_no_source(toy):
    _, record, _ = toy
    assert record["memory_gib"]["temporaries"] < 0.05 * record["peak_gib"]
    largest = record["largest_buffers"]
    assert len(largest) == NUM_LARGEST
    sizes = [buffer["gib"] for buffer in largest]
    assert sizes == sorted(sizes, reverse=True)
    for buffer in largest:
        is_argument = buffer["kind"] in ("masters", "moments")
        assert buffer["source"].startswith(("moejax/", "train/")) != is_argument, buffer


@pytest.mark.slow
@pytest.mark.aot
def test_kernels_are_those_of_the_target(toy):
    text, record, _ = toy
    assert record["kernels"]["grouped_dot"]["implementation"] == "hopper"
    assert "grouped_dot hopper (NVIDIA H100" in text
    assert "not covered: autotuning" in text


@pytest.mark.slow
@pytest.mark.aot
def test_row_exchanges_are_found_and_no_large_float32_travels(toy):
    """Two layers send rows and bring them home, forward and backward, in two
    micro-batches; gradients alone travel in float32, as reduce-scatters."""
    text, record, _ = toy
    rows = record["collectives"]
    exchanges = [row for row in rows if row["is_exchange"]]
    assert exchanges
    assert all(row["kind"] == "all-to-all" and row["is_ours"] for row in exchanges)
    assert 0 <= record["exchange_hidden_share"] <= 1
    assert record["largest_float32_collective_bytes"] <= 2**20
    assert not record["remat_collectives"] or record["num_remat_ops"] > 0
    assert "all-to-all" in text


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.aot
@pytest.mark.parametrize(("overflow", "num_waits"), [("redo", 0), ("rounds", 8)])
def test_the_host_waits_at_no_loop_of_a_step_without_later_rounds(overflow, num_waits):
    """With later rounds it waits forward and backward, in two layers of two
    micro-batches. Attention waits by itself, but for 'reference'."""
    params = ["Dispatch.buffer_factor = 1.5", f"Dispatch.overflow = '{overflow}'"]
    params += ["Model.attention = 'reference'"]
    words = [f"--gin_param={param}" for param in params]
    text, record = run_aot(f"--gin_file={TOY}", *TARGET, *words)
    assert record["num_host_waits"] == num_waits
    assert f"host waits: {num_waits} in a step" in text


@pytest.mark.slow
@pytest.mark.aot
def test_exposed_seconds_are_divided_among_reasons(toy):
    """The collectives of a toy are too short for the table to list them."""
    text, record, page = toy
    for row in record["collectives"]:
        parts = row["exposed_by"]
        assert sum(parts.values()) == pytest.approx(row["exposed_sec"], abs=1e-12)
        assert row["is_async"] or not sum(parts.values()) - parts["synchronous"]
        assert row["independent_sec"] >= row["seconds"] - row["exposed_sec"] - 1e-12
    for written in (text, page):
        assert "what stays exposed, and why" in written


@pytest.mark.slow
@pytest.mark.aot
def test_the_page_says_what_the_text_says(toy):
    text, record, page = toy
    assert page.startswith("<!doctype html>")
    assert "http" not in page  # one file, which loads nothing
    for kind in KINDS:
        assert f"<td>{kind}</td>" in page
    assert f"{record['peak_gib']:.3f}" in page
    assert f"{record['peak_gib']:.3f}" in text


@pytest.mark.slow
@pytest.mark.aot
def test_kernels_of_attention_are_named_and_short_windows_are_not_judged(toy):
    text, record, page = toy
    assert record["attention_calls"]
    assert record["largest_square_array"] is None
    for name in record["attention_calls"]:
        assert name in text
    for written in (text, page):
        assert "largest [t, t]     not looked for: t = 256 is less than 1024" in written


def refused(capsys, *words) -> str:
    """Return the line with which the tool refuses its words."""
    assert aot.main([f"--gin_file={TOY}", *words]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    return line


def test_an_unknown_target(capsys):
    line = refused(capsys, "--target=h101")
    assert line.startswith("error: no target 'h101': give b200, h100, h200")


@pytest.mark.parametrize("words", [("--devices=4",), ("--nodes=2",), ("--nodes=0",)])
def test_devices_that_are_not_the_mesh(capsys, words):
    line = refused(capsys, *words)
    assert "--devices" in line
    assert "--nodes" in line


def test_a_target_file_with_a_missing_field(capsys, tmp_path):
    path = tmp_path / "mine.toml"
    lines = (FOLDER / "h100.toml").read_text().splitlines()
    path.write_text("\n".join(x for x in lines if not x.startswith("l2_bytes")))
    assert refused(capsys, f"--target={path}").endswith("no field 'l2_bytes'")


def test_missing_wheels(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(wheels, "FOLDER", tmp_path / "none")
    assert "make aot-wheels" in refused(capsys, *TARGET)


def test_wheels_of_another_version(capsys, tmp_path, monkeypatch):
    (tmp_path / "jax_plugins" / "xla_cuda13").mkdir(parents=True)
    (tmp_path / "jax_cuda13_plugin-0.1.2.dist-info").mkdir()
    monkeypatch.setattr(wheels, "FOLDER", tmp_path)
    assert "is 0.1.2, and JAX" in refused(capsys, *TARGET)


def test_a_wrong_memory_fraction(capsys, monkeypatch):
    monkeypatch.setenv("XLA_PYTHON_CLIENT_MEM_FRACTION", "90")
    line = refused(capsys, *TARGET)
    assert "XLA_PYTHON_CLIENT_MEM_FRACTION='90' must be a number above 0" in line


@pytest.mark.parametrize("word", ["--html=x.html", "--keep=x", "--costs=x"])
def test_a_census_writes_no_file(capsys, word):
    assert "--census writes no file" in refused(capsys, "--census", word)


@pytest.mark.parametrize("flag", ["--html", "--costs"])
def test_a_file_in_a_folder_that_is_not_there(capsys, tmp_path, flag):
    line = refused(capsys, *TARGET, f"{flag}={tmp_path / 'no' / 'file.pbtxt'}")
    assert f"{flag}=" in line
    assert "no folder" in line


def test_costs_have_the_suffix_by_which_xla_knows_text(capsys, tmp_path):
    assert "*.pbtxt" in refused(capsys, *TARGET, f"--costs={tmp_path / 'costs'}")


def test_what_xla_wrote_is_kept_in_an_empty_folder_alone(capsys, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(wheels, "put_on_path", lambda: None)
    assert "not empty" in refused(capsys, *TARGET, f"--keep={tmp_path}")
    assert "not a folder" in refused(capsys, *TARGET, f"--keep={tmp_path / 'file'}")


@pytest.mark.long
@pytest.mark.aot
def test_weights_travel_beside_the_products_of_the_layer_before():
    """In both passes all of the gather over data hides, and products stand beside it.
    Layers run four times in a step."""
    sizes = ("--gin_param=Mesh.data = 2", "--gin_param=Mesh.expert = 4")
    _, record = run_aot(f"--gin_file={TOY}", *TARGET, *sizes)
    slots = [
        c
        for c in record["collectives"]
        if c["scope"] == "slots" and c["axes"] == ["data"] and c["runs"] >= 4
    ]
    gathers = {c["phase"]: c for c in slots if c["kind"] == "all-gather"}
    assert set(gathers) == {"forward", "backward"}
    assert {c["kind"] for c in slots} == {"all-gather", "all-to-all"}
    for collective in slots:
        assert collective["hidden_share"] > 0.9
        beside = " ".join(collective["beside"])
        assert "grouped_rows" in beside or "dot_general" in beside


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.aot
def test_rows_of_one_half_travel_under_the_experts_of_the_other():
    """Two of OLMoE's layers with Moe.halves, without later rounds. The gradients of
    results (backward combine) of each half travel under grouped products of rows, which
    must be the other half's, because its own wait for them. So does the dispatch of one
    half in the forward pass. The gradients of dispatched rows travel under grouped
    products of either half: of weights, which wait for no rows. The first dispatch and
    the combines of the forward pass stand under no grouped product of rows."""
    params = (
        "Moe.halves = True", "Dispatch.overflow = 'redo'", "Model.num_layers = 2",
        "Train.accumulate_steps = 1", "Train.batch_size = 16",
    )  # fmt: skip
    _, record = run_aot(
        f"--gin_file={ROOT / 'configs' / 'olmoe_1b_7b.gin'}",
        *TARGET,
        *(f"--gin_param={param}" for param in params),
    )
    rows = {
        (row["phase"], row["scope"]): row
        for row in record["collectives"]
        if row["is_exchange"]
    }
    assert len(rows) == 4
    for row in rows.values():
        assert len(row["products_beside"]) == 2, "one of each half, in two layers"
        assert row["runs"] == 4

    def under(phase: str, scope: str, product: str) -> list[bool]:
        products = rows[phase, scope]["products_beside"]
        return [f"experts/{product}" in beside for beside in products]

    assert under("backward", "combine", "grouped_rows") == [True, True]
    assert under("backward", "dispatch", "grouped_matrices") == [True, True]
    assert any(under("forward", "dispatch", "grouped_rows"))
    for scope in ("combine", "dispatch"):
        assert rows["backward", scope]["hidden_share"] > 0.95
    assert record["exchange_hidden_share"] > 0.75


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.aot
@pytest.mark.parametrize(
    ("config", "sizes", "under"),
    [
        ("olmoe_1b_7b", ("Dispatch.slots_per_device = 12",), ("attention",) * 2),
        (
            "mixtral_8x7b",
            ("Mesh.data = 1", "Model.num_layers = 4", "Train.batch_size = 64"),
            ("attention", "experts"),
        ),
    ],
)
def test_copies_travel_in_parts_under_attention_and_experts(config, sizes, under):
    """Pro-Prophet's schedule on 8 H100s. OLMoE's copies fit under attention; of
    Mixtral's, the second part travels under the experts, and sums of gradients do
    so too, one part under each."""
    params = ("Balance.policy = 'prophet'", *sizes)
    _, record = run_aot(
        f"--gin_file={ROOT / 'configs' / config}.gin",
        *TARGET,
        *(f"--gin_param={param}" for param in params),
    )
    found = record["sub_operators"]
    runs = max(each["runs"] for each in found)
    parts = {
        (what, phase): [
            each
            for each in found
            if (each["what"], each["phase"], each["runs"]) == (what, phase, runs)
        ]
        for what, phase in (("weights", "forward"), ("gradients", "backward"))
    }
    for each in itertools.chain(*parts.values()):
        assert each["exposed_sec"] < 0.05 * each["seconds"]
    forward = parts["weights", "forward"]
    assert len(forward) == 2
    for each, part in zip(forward, under, strict=True):
        others = {"attention", "experts"} - {part}
        assert each["hidden_sec"][part] > max(each["hidden_sec"][o] for o in others)
    if "experts" in under:
        sums = parts["gradients", "backward"]
        longest = [max(s["hidden_sec"], key=s["hidden_sec"].get) for s in sums]
        assert sorted(longest) == ["attention", "experts"]
