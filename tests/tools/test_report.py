"""Test tools/report.py: the file that it writes, and bad input."""

import json
import pathlib

import pytest

from tests.support.page_contract import require_contract
from tests.support.run_folders import finish, make_folder
from tools import report


def data_of(path: pathlib.Path) -> dict:
    """Return the data in a page."""
    text = path.read_text()
    begin = text.index(">", text.index('<script type="application/json" id="data"')) + 1
    return json.loads(text[begin : text.index("</script>", begin)])


def test_a_page_is_written_and_said(tmp_path, capsys):
    finish(folder := make_folder(tmp_path / "<b>one"))
    out = tmp_path / "page.html"
    assert report.main([str(folder), f"--out={out}", "--json"]) == 0
    record = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (record["file"], record["num_bytes"]) == (str(out), out.stat().st_size)
    assert (record["run"]["name"], record["run"]["state"]) == ("<b>one", "finished")
    require_contract(data_of(out))
    assert "Content-Security-Policy" in out.read_text()[:3000]


def test_an_empty_run_is_shown(tmp_path):
    empty = make_folder(tmp_path / "empty")
    for change in (lambda path: path.write_text(""), pathlib.Path.unlink):
        change(empty / "metrics.jsonl")
        assert report.main([str(empty)]) == 0
        assert data_of(empty / "report.html")["curves"] == {}


@pytest.mark.parametrize(
    ("args", "what"),
    [
        (["{tmp}/none"], "is not a folder: name the run directory"),
        (["{tmp}"], "has no metrics.jsonl: name the run directory"),
        (["{tmp}/unreadable"], "Is a directory"),
        (["{tmp}/text"], "has 50 damaged lines and 1 good ones"),
        (["{run}", "--out={tmp}"], "cannot be written: Is a directory"),
        (["{run}", "--out={tmp}/none/a.html"], "cannot be written: No such file"),
    ],
)
def test_bad_input_is_one_line(tmp_path, capsys, args, what):
    run = make_folder(tmp_path / "run")
    (make_folder(tmp_path / "unreadable", metrics=None) / "metrics.jsonl").mkdir()
    make_folder(tmp_path / "text", metrics=["text"] * 50 + ['{"step": 1, "loss": 1}'])
    args = [arg.format(tmp=tmp_path, run=run) for arg in args]
    assert report.main([*args, "--json"]) == 2
    out, err = capsys.readouterr()
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert what in err
    assert json.loads(out) == {"error": err[len("error: ") : -1], "exit_code": 2}
    assert not list(tmp_path.glob("*.html*"))
