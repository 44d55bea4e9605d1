"""Test tools/report.py: the file that it writes, bad input, and the server as a
program that is killed and started again."""

import contextlib
import json
import os
import pathlib
import signal
import subprocess
import sys
import urllib.request

import pytest

from tests.support.page_contract import require_contract
from tests.support.run_folders import CONFIG, finish, make_folder
from tools import report


def data_of(path: pathlib.Path) -> dict:
    """Return the data in a page."""
    text = path.read_text()
    begin = text.index(">", text.index('<script type="application/json" id="data"')) + 1
    return json.loads(text[begin : text.index("</script>", begin)])


def test_a_page_of_two_runs(tmp_path, capsys):
    one, two = (make_folder(tmp_path / name) for name in ("<b>one", "two"))
    (two / "config.gin").write_text(CONFIG.replace("top_k = 2", "top_k = 4"))
    finish(two)
    out = tmp_path / "both.html"
    assert report.main([str(one), str(two), f"--out={out}", "--json"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == (
        "<b>one: stopped after step 40 of 40, which is saved: start it again to go on"
    )
    record = json.loads(lines[-1])
    assert (record["file"], record["num_bytes"]) == (str(out), out.stat().st_size)
    assert [run["state"] for run in record["runs"]] == ["stopped", "finished"]
    data = data_of(out)
    require_contract(data)
    assert data["differences"] == [["Moe.top_k", ["2", "4"]]]
    assert data["live"] is False
    assert "Content-Security-Policy" in out.read_text()[:3000]


def test_an_empty_run_among_others_is_shown(tmp_path):
    full, empty = (make_folder(tmp_path / name) for name in ("full", "empty"))
    (empty / "metrics.jsonl").write_text("")
    assert report.main([str(full), str(empty)]) == 0
    runs = data_of(full / "report.html")["runs"]
    assert [run["state"] for run in runs] == ["stopped", "empty"]
    (empty / "metrics.jsonl").unlink()
    assert report.main([str(empty)]) == 0
    assert data_of(empty / "report.html")["runs"][0]["curves"] == {}


@pytest.mark.parametrize(
    ("args", "what"),
    [
        (["{tmp}/none"], "is not a folder: name the run directory"),
        (["{tmp}"], "has no metrics.jsonl: name the run directory"),
        (["{run}/metrics.jsonl"], "metrics.jsonl is not a folder"),
        (["{run}", "{tmp}/unreadable"], "Is a directory"),
        (["{run}", "{tmp}/text"], "has 50 damaged lines and 1 good ones"),
        (["{run}", "--out={tmp}"], "cannot be written: Is a directory"),
        (["{run}", "--out={tmp}/none/a.html"], "cannot be written: No such file"),
        (["{run}", "--serve", "--out=a.html"], "--serve writes no file"),
        (["{run}", "--port=1"], "--port=1 is for --serve"),
        (["{run}", "--serve", "--port=99999"], "is a number from 0 to 65535: give"),
        (["{run}", "--serve", "--port=-1"], "is a number from 0 to 65535: give"),
        (["{tmp}/none", "--serve", "--port=0"], "is not a folder"),
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


@contextlib.contextmanager
def serving(repo: pathlib.Path, folder: pathlib.Path, port: int = 0):
    """Run the program with --serve; yield its process and its address."""
    words = [str(repo / "tools" / "report.py"), str(folder), "--serve", "--json"]
    environment = os.environ | {"PYTHONUNBUFFERED": "1"}
    process = subprocess.Popen(
        [sys.executable, *words, f"--port={port}"],
        env=environment, cwd=folder, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    try:
        process.stdout.readline()
        line = process.stdout.readline()
        assert line, process.stderr.read()
        yield process, json.loads(line)["address"]
    finally:
        process.kill()
        process.communicate()


def test_a_server_that_is_killed_goes_on_when_it_is_started_again(repo, tmp_path):
    folder = make_folder(tmp_path / "run")
    with serving(repo, folder) as (process, address):
        port = int(address.rstrip("/").rpartition(":")[2])
        with urllib.request.urlopen(f"{address}data.json", timeout=10) as answer:
            before = json.load(answer)
        process.kill()
    with serving(repo, folder, port) as (process, again):
        assert again == address
        with urllib.request.urlopen(f"{address}data.json", timeout=10) as answer:
            assert json.load(answer)["runs"] == before["runs"]
        assert report.main([str(folder), "--serve", f"--port={port}"]) == 2
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=10)
        assert (process.returncode, out, err) == (0, "\nno longer served\n", "")
