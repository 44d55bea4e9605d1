"""Test live clusters: that links and cores are slowed, how runs on them end, and that
nothing is left behind."""

import contextlib
import json
import pathlib
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from tests.support.pids import is_alive, wait_until_gone
from tests.support.run_main import ROOT
from tests.support.waiting import wait_until
from tools.testbed import cluster, network, quota
from tools.testbed.lock import hold_lock

TOOL = ROOT / "tools" / "testbed" / "run.py"
WAIT_SEC = 60
"""Seconds to wait for other clusters of this machine to end."""
PEERS = """
import json, os, pathlib, socket, sys, time
me = int(os.environ["MOEJAX_PROCESS_ID"])
host, port = os.environ["MOEJAX_COORDINATOR"].split(":")
folder = pathlib.Path(sys.argv[1])
def ready(): (folder / f"ready-{me}").write_text(str(os.getpid()))
def wait_forever():
    ready()
    while True: time.sleep(0.05)
def connected():
    while True:
        try: return socket.create_connection((host, int(port)), timeout=5)
        except OSError: time.sleep(0.01)
"""
TRANSFER = """
num_bytes = int(sys.argv[2])
if me:
    with connected() as connection:
        connection.settimeout(60)
        connection.recv(1)
        connection.sendall(bytes(num_bytes))
else:
    with socket.create_server((host, int(port))) as server:
        connection, (peer, _) = server.accept()
        connection.sendall(b".")  # the sender waits for it
        while connection.recv(1 << 20): pass
    mine = socket.gethostbyname(socket.gethostname())
    print(json.dumps({"peer": peer, "mine": mine}))
"""


def write(folder: pathlib.Path, program: str) -> str:
    path = folder / "program.py"
    path.write_text(PEERS + program)
    return str(path)


def test_a_held_program_does_nothing(tmp_path):
    """Each tick of a process is a byte in a file; a tick takes 2 ms. Nothing is in the
    middle of a tick once both processes are stopped."""
    ticks = tmp_path / "ticks"
    program = write(
        tmp_path,
        f"""
ready()
while True:
    with open({str(ticks)!r}, "ab") as file: file.write(b".")
    time.sleep(0.002)
""",
    )
    spec = cluster.Cluster(dcs=1, per_dc=2)
    live = cluster.LiveCluster(spec, has_namespaces=False, groups=None)

    with live.held([program, str(tmp_path)]) as held:
        paths = [tmp_path / f"ready-{index}" for index in range(2)]
        wait_until(lambda: all(path.exists() and path.read_text() for path in paths))
        pids = [int(path.read_text()) for path in paths]
        wait_until(ticks.exists)
        held.hold()
        wait_until(lambda: all(map(is_stopped, pids)))
        size = ticks.stat().st_size
        time.sleep(0.5)
        assert ticks.stat().st_size == size
        held.go_on()
        wait_until(lambda: ticks.stat().st_size > size)


def is_stopped(pid: int) -> bool:
    """Return whether a process is stopped, as by SIGSTOP."""
    stat = pathlib.Path(f"/proc/{pid}/stat").read_text()
    return stat.rpartition(") ")[2].startswith("T")


def on_a_cluster(code: str, *words: str) -> subprocess.CompletedProcess:
    """Run code that uses clusters, and assert that it ends well.

    The code runs in a process that does not import jax, because clusters fork. There
    `program` is the list of `words`, and `say` prints results as JSON.
    """
    start = f"""
import dataclasses, json, os, pathlib, sys; sys.path.insert(0, {str(ROOT)!r})
from tools.testbed.cluster import Cluster, make_cluster
def say(*results): print(json.dumps([dataclasses.asdict(x) for x in results]))
program, WAIT_SEC = sys.argv[1:], {WAIT_SEC}
"""
    command = [sys.executable, "-c", start + code, *words]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    return result


def left() -> list[str]:
    """Return what testbeds have left behind, at a time when none is running."""
    with hold_lock(WAIT_SEC):
        return network.leftovers() + quota.leftovers()


@contextlib.contextmanager
def tool(folder: pathlib.Path, program: str, *flags: str):
    """Start `run.py run` with two DCs, and yield its process and the pids of the two
    workers once both are ready."""
    words = [sys.executable, str(TOOL), "run", f"--wait_sec={WAIT_SEC}", *flags, "--"]
    words += [write(folder, program), str(folder)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(words, **pipes) as process:
        paths = [folder / f"ready-{index}" for index in range(2)]
        end_sec = time.monotonic() + 2 * WAIT_SEC
        while not all(path.exists() and path.read_text() for path in paths):
            assert process.poll() is None, process.communicate()
            assert time.monotonic() < end_sec, "the processes never began"
            time.sleep(0.01)
        yield process, [int(path.read_text()) for path in paths]
        process.kill()


def test_without_root_it_says_so_and_runs_on_the_loopback(tmp_path):
    code = """
os.geteuid = lambda: 1000
with make_cluster(Cluster(rate_mbit=1.0, quota=0.5)) as cluster:
    say(cluster.run(program, timeout_sec=60))
"""
    script = on_a_cluster(code, write(tmp_path, TRANSFER), str(tmp_path), "8000")
    (result,) = json.loads(script.stdout)
    assert json.loads(result["lines"][-1])["peer"] == "127.0.0.1"
    assert (result["exit_code"], result["uplink_bytes"]) == (0, [])
    assert not result["is_shaped"]
    assert script.stderr.splitlines() == [
        "testbed: network namespaces need root: links are NOT shaped, processes meet "
        "on 127.0.0.1",
        "testbed: cpu quotas need root: processes run WITHOUT a quota",
    ]


@pytest.mark.root
def test_links_have_their_rate_and_nothing_is_left(tmp_path):
    """Both ends of each link hold the rate, 100 Mb/s, and what a process sends passes
    its link. Two programs run on the same cluster, one after another."""
    num_bytes = 10_000_000
    code = """
import subprocess
from tools.testbed.network import HUB, dc_name
def rates(namespace):
    words = ["tc", "-json", "-n", namespace, "qdisc", "show"]
    found = json.loads(subprocess.check_output(words))
    return [x["options"]["rate"] for x in found if x["kind"] == "tbf"]
with make_cluster(Cluster(rate_mbit=100.0), wait_sec=WAIT_SEC) as cluster:
    assert rates(dc_name(0)) == rates(dc_name(1)) == [12_500_000], "in bytes/s"
    assert rates(HUB) == 2 * [12_500_000]
    say(*[cluster.run(program, timeout_sec=60) for _ in range(2)])
"""
    script = on_a_cluster(
        code, write(tmp_path, TRANSFER), str(tmp_path), str(num_bytes)
    )
    results = json.loads(script.stdout)
    assert len(results) == 2
    for result in results:
        measured = json.loads(result["lines"][-1])
        assert (result["exit_code"], result["is_shaped"]) == (0, True)
        assert (measured["peer"], measured["mine"]) == ("10.77.0.2", "10.77.0.1")
        from_receiver, from_sender = result["uplink_bytes"]
        assert from_receiver < 0.1 * num_bytes < num_bytes < from_sender
        assert from_sender < 1.1 * num_bytes
    assert left() == []


@pytest.mark.root
def test_one_dc_is_unshaped_and_a_quota_changes_while_the_cluster_lives(tmp_path):
    """Each process is in its control group, on one core, and the group's files hold the
    quota of the time."""
    where = """
groups = pathlib.Path("/proc/self/cgroup").read_text().splitlines()
is_member = any(line.endswith(f"/moejax-testbed/p{me}") for line in groups)
print(json.dumps([is_member, len(os.sched_getaffinity(0))]))
"""
    code = """
from tools.testbed.quota import quota_files
def require_quota(cores):
    files = quota_files(cores, is_v2=cluster.groups.is_v2)
    for folder in cluster.groups.folders:
        found = {name: (folder / name).read_text().strip() for name in files}
        assert found == files, found
with make_cluster(Cluster(dcs=1, per_dc=2, quota=0.2), wait_sec=WAIT_SEC) as cluster:
    require_quota(0.2)
    before = cluster.run(program, timeout_sec=60)
    cluster.set_quota(0.6)
    require_quota(0.6)
    say(before, cluster.run(program, timeout_sec=60))
"""
    script = on_a_cluster(code, write(tmp_path, where), str(tmp_path))
    for result in json.loads(script.stdout):
        assert not result["is_shaped"]
        assert json.loads(result["lines"][-1]) == [True, 1]
    assert left() == []


@pytest.mark.root
def test_a_signal_ends_all_and_cleans_up(tmp_path):
    with tool(tmp_path, "wait_forever()") as (process, pids):
        process.send_signal(signal.SIGTERM)
        _, err = process.communicate(timeout=60)
        wait_until_gone(pids)
    assert process.returncode == 130
    assert err.endswith("error: interrupted\n")
    assert left() == []


@pytest.fixture
def stranger() -> Iterator[str]:
    """The name of a namespace that is almost one of a testbed."""
    name = "moejax-dcx"
    subprocess.run(["ip", "netns", "add", name], check=True)
    yield name
    subprocess.run(["ip", "netns", "delete", name], check=True)


@pytest.mark.root
def test_leftovers_of_a_killed_testbed_are_removed_by_the_next(tmp_path, stranger):
    """A process that has left its process group is found in its namespace. Namespaces
    of others are left alone."""
    program = """
child = os.spawnlp(os.P_NOWAIT, "setsid", "setsid", "sleep", "600")
(folder / f"child-{me}").write_text(str(child)); wait_forever()
"""
    with tool(tmp_path, program) as (process, pids):
        children = [int((tmp_path / f"child-{i}").read_text()) for i in range(2)]
        clean = [sys.executable, str(TOOL), "clean"]
        result = subprocess.run(clean, capture_output=True, text=True, check=False)
        assert result.returncode == 2
        assert f"another testbed (pid {process.pid}) is running" in result.stderr
        process.kill()
        process.communicate()
        wait_until_gone(pids)
    assert all(map(is_alive, children))
    leftovers = set(left())
    assert {"moejax-hub", "moejax-dc0", "moejax-dc1"} <= leftovers
    assert stranger not in leftovers
    on_a_cluster(
        "with make_cluster(Cluster(), wait_sec=WAIT_SEC) as live: assert live.is_shaped"
    )
    wait_until_gone(children)
    assert left() == []
    assert stranger in subprocess.check_output(["ip", "netns", "list"], text=True)


@pytest.mark.root
def test_a_time_out_ends_a_run(tmp_path):
    code = """
with make_cluster(Cluster(rate_mbit=None), wait_sec=WAIT_SEC) as cluster:
    say(cluster.run(program, timeout_sec=0.1))
"""
    script = on_a_cluster(code, write(tmp_path, "wait_forever()"), str(tmp_path))
    assert [x["exit_code"] for x in json.loads(script.stdout)] == [124]
    assert "not finished after 0.1 s: all processes were ended" in script.stderr
