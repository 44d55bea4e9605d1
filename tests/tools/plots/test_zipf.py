"""The sweep of Zipf's skew: its laws, its table and its picture."""

import json

import numpy as np
import pytest
from PIL import Image

from moejax.balance.policies.micromoe.density import density
from tools.plots import zipf
from tools.plots.zipf import REPLICAS, SKEWS, SLOTS, E, W

pytestmark = pytest.mark.filterwarnings("error")  # matplotlib warns of ugly layouts


@pytest.fixture(scope="module")
def curves():
    return zipf.sweep(draws=4, seed=0)


def test_curves_keep_their_order(curves):
    assert all((curve >= 1 - 1e-9).all() for curve in curves.values())
    assert (curves["vanilla"] > 1.02).all()
    for name in ("vanilla", "random", "symmetric"):  # two replicas of each expert
        assert (curves[name] >= curves["floor"] - 1e-9).all()
    assert (curves["random"] <= curves["vanilla"]).all()
    assert curves["symmetric"].mean() <= curves["random"].mean()


def test_what_the_paper_says_of_its_figure(curves):
    """Symmetric plans are perfect while s < 1, but for the pairs of experts on one pair
    of devices, and asymmetric ones always; ours, dynamic ones too."""
    skew_s = np.array(SKEWS)
    assert (curves["symmetric"][skew_s <= 0.8] < 1.01).all()
    assert (curves["symmetric"][skew_s >= 1.2] > 1.2).all()
    assert (curves["asymmetric"] < zipf.PERFECT).all()
    assert (curves["dynamic"] <= 1 + W / zipf.ROWS).all()


def test_vanilla_balances_within_its_groups_alone():
    """Devices d and d + 4 share their experts: the fuller pair's rows over two."""
    load_e = np.random.default_rng(0).integers(1, 100, E)
    pair_rows = load_e.reshape(W // REPLICAS, -1).sum(axis=1)
    assert np.isclose(density(zipf.vanilla(), load_e, W), pair_rows.max() / 2)


def test_random_plan_has_two_replicas_on_devices_of_their_own():
    row_p = zipf.at_random(np.random.default_rng(0))
    assert set(np.bincount(row_p)) == {REPLICAS}
    assert all(len(set(row_s)) == SLOTS for row_s in row_p.reshape(W, -1).tolist())


def test_command_draws_and_tells(tmp_path, capsys):
    out = tmp_path / "sub" / "zipf.png"
    assert zipf.main([f"--out={out}", "--draws=1", "--json"]) == 0
    text, _, last = capsys.readouterr().out.rstrip().rpartition("\n")
    record = json.loads(last)
    assert record["skews"] == list(SKEWS)
    for curve in record["max_over_mean"].values():
        assert f"| {SKEWS[-1]} |" in text
        assert f" {curve[-1]:.3f} |" in text
    assert [row["curve"] for row in record["published"]] == [
        "symmetric", "random", "asymmetric",
    ]  # fmt: skip
    assert all(row["published"] in text for row in record["published"])
    with Image.open(out) as picture:
        assert picture.width == 836
    assert out.stat().st_size < 150_000


def test_no_draws_is_one_line_and_exit_2(capsys):
    assert zipf.main(["--draws=0"]) == 2
    assert capsys.readouterr().err == "error: --draws 0 must be at least 1\n"
