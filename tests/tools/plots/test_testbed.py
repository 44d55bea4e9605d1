"""Test the pictures and tables of testbed measurements on a small made record."""

import json

import pytest
from PIL import Image

from tools.plots import testbed
from tools.testbed import links

pytestmark = pytest.mark.filterwarnings("error")  # matplotlib warns of ugly layouts


def part(cases: list[dict], chosen: str) -> dict:
    """Return a record as links.py makes it. The time of a variant is proportional to
    its position in the list and to the number of the case."""
    records = []
    for number, case in enumerate(cases, 1):
        sec = {
            variant: 0.01 * number * n for n, variant in enumerate(case["variants"], 1)
        }
        auto = {"auto": sec[chosen]}
        records.append({
            "name": case["name"], "chosen": chosen, "step_sec": sec | auto,
            "predicted_sec": {variant: 0.9 * x for variant, x in sec.items()},
            "sent_bytes": {"auto": 2e6}, "expected_bytes": {"auto": 1.9e6},
        })  # fmt: skip
    return {"cases": records}


RECORD = {
    "domains": part(links.domain_cases(), "2x1"),
    "schedules": part(links.schedule_cases(), "s1h"),
    "selector": part(links.layer_cases(), "s1"),
    "domains_speedup": 7.0,
}


def test_every_part_has_a_picture_and_a_table(tmp_path, capsys):
    path = tmp_path / "headline.json"
    path.write_text("words before\n" + json.dumps(RECORD) + "\n")
    assert testbed.main([str(path), f"--out={tmp_path / 'out'}", "--json"]) == 0
    lines = capsys.readouterr().out.splitlines()
    written = json.loads(lines[-1])["out"]
    assert len(written) == 3
    for name in written:
        with Image.open(name) as picture:
            colors = picture.convert("RGB").getcolors(1 << 20)
            assert picture.width > 600
        assert len(colors) > 50
    rows = [line for line in lines if line.startswith("| D=0.5 P_E=0.25 ")]
    cells = "10 [9] | **20** [18] | 30 [27] | 40 [36] | 2x1 | 20 | 2.00 [1.90] |"
    assert rows == ["| D=0.5 P_E=0.25 | " + cells]
    assert sum(line.startswith("| layer ") for line in lines) == 24


def test_a_record_of_one_part_has_one_picture(tmp_path, capsys):
    path = tmp_path / "headline.json"
    path.write_text(json.dumps({"schedules": RECORD["schedules"]}))
    assert testbed.main([str(path), f"--out={tmp_path}"]) == 0
    assert [x.name for x in tmp_path.glob("*.png")] == ["testbed_schedules.png"]


@pytest.mark.parametrize(
    ("text", "what"),
    [(None, "cannot read"), ("{", "cannot read"), ("", "has none of domains"),
     ('{"balancer_speedup": 2}', "has none of domains")],
)  # fmt: skip
def test_other_files_are_refused_in_one_line(tmp_path, capsys, text, what):
    path = tmp_path / "headline.json"
    if text is not None:
        path.write_text(text)
    assert testbed.main([str(path)]) == 2
    err = capsys.readouterr().err
    assert what in err
    assert err.count("\n") == 1
