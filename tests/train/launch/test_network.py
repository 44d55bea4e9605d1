"""Test on which addresses the processes of a run listen."""

import inspect
import os
import pathlib
import socket
import subprocess
import sys

import jax
import pytest

from tests.support.certificates import new_certificate
from tests.support.meeting import ROOT, Meeting
from tests.support.workers import LiveWorkers
from tools.testbed import network as testbed
from tools.testbed.lock import hold_lock, remove_leftovers
from train.launch import network
from train.launch.network import bind_address, local_address, resolve, split
from train.launch.tls import URI_PREFIX

LISTENS = "0A"
"""State of a listening socket in /proc/net/tcp."""
LOOPBACK_WORDS = ("0100007F", "0" * 24 + "01000000", "0" * 16 + "FFFF0000" + "0100007F")
"""127.0.0.1, ::1 and ::ffff:127.0.0.1 in /proc/net/tcp and tcp6."""
LAN = "10.99.0.1"
"""Address that the host's name resolves to in `in_a_lan`."""
IN_A_LAN = """
ip link set lo up && ip address add 10.99.0.1/32 dev lo || exit
mount --bind "$1" /etc/hosts && test "$(hostname -i)" = 10.99.0.1 || exit
shift && exec "$@"
"""


def listening_addresses(pid: int) -> list[str]:
    """Return the addresses, as /proc/net/tcp has them, of all sockets that listen in
    the network namespace of a process."""
    lines = []
    for name in ("tcp", "tcp6"):
        text = pathlib.Path(f"/proc/{pid}/net/{name}").read_text()
        lines += [line.split() for line in text.splitlines()[1:]]
    return [words[1].partition(":")[0] for words in lines if words[3] == LISTENS]


def in_a_lan(folder: pathlib.Path) -> list[str]:
    """Return words before a command that run it on a host of its own, whose name
    resolves to LAN."""
    hosts = folder / "hosts"
    hosts.write_text(f"127.0.0.1 localhost\n{LAN} {socket.gethostname()}\n")
    words = ["unshare", "--mount", "--net", "--", "bash", "-c", IN_A_LAN, "bash"]
    return [*words, str(hosts)]


@pytest.mark.root
@pytest.mark.slow
def test_processes_of_one_host_listen_on_loopback_alone(tmp_path):
    """The host's name resolves to another address of it; the processes have a network
    of their own, so all sockets that listen there are theirs."""
    with Meeting(tmp_path, *in_a_lan(tmp_path)) as meeting:
        found = listening_addresses(meeting.pids[0])
        code, text, _ = meeting.end()
    assert len(found) == 3  # the coordinator, and gloo twice
    assert set(found) <= set(LOOPBACK_WORDS)
    assert code == 0, text
    assert text.count("gloo, for collectives of CPUs, listens on 127.0.0.1") == 2
    assert f"the coordinator listens on {meeting.coordinator}, without TLS" in text


@pytest.mark.long
@pytest.mark.root
def test_a_run_listens_on_loopback_alone(tmp_path):
    """All of the trainer's processes, balancer and saves included, do as above."""
    prefix = in_a_lan(tmp_path)
    with LiveWorkers(tmp_path / "run", 2, prefix=prefix) as live:
        live.wait_for_steps(10)
        pids = live.pids()
        found = listening_addresses(pids[0])
        ended = live.end()
    assert len(found) == 3
    assert set(found) <= set(LOOPBACK_WORDS)
    assert ended.code == 0, ended.err


def test_the_coordinator_listens_on_one_address_where_that_is_enough(monkeypatch):
    for address in ("127.0.0.1:7000", "localhost:7000", "[::1]:7000"):
        assert bind_address(address, {}) == address
    everywhere = {network.BIND_ADDRESS: "[::]:9000"}
    assert bind_address("127.0.0.1:7000", everywhere) == "[::]:9000"
    known = {
        "mine": LAN,
        "mine6": "fd00::7",
        "debian": "127.0.1.1",
        "service": "10.99.0.2",
        "unknown": None,
    }
    monkeypatch.setattr(network, "resolve", known.get)
    monkeypatch.setattr(network, "_is_local", lambda x: x not in (None, "10.99.0.2"))
    assert bind_address("mine:7000", {}) == f"{LAN}:7000"
    assert bind_address("mine6:7000", {}) == "[fd00::7]:7000"
    for name in ("debian", "service", "unknown"):
        assert bind_address(f"{name}:7000", {}) == "[::]:7000"


def test_names_resolve_to_ipv4_first(monkeypatch):
    """gloo connects addresses of one family, and hosts may order them differently."""
    assert resolve("127.0.0.1") == "127.0.0.1"
    assert resolve("::1") == "::1"
    assert resolve("no-such-host.invalid") is None
    found = [
        (socket.AF_INET6, 0, 0, "", ("fd00::7", 0, 0, 0)),
        (socket.AF_INET, 0, 0, "", (LAN, 0)),
    ]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found)
    assert resolve("node1") == LAN


def test_an_address_of_this_host_is_reached_from_itself():
    for address in ("127.0.0.1", "127.0.1.1", "::1"):
        assert local_address(address) == address
    assert split("[fd00::7]:7000") == ("fd00::7", 7000)


class Store:
    """The coordinator's key-value store, as far as it is needed here."""

    def __init__(self, **told: str):
        self.texts = {f"moejax/coordinator_address/{k[1:]}": x for k, x in told.items()}

    def key_value_set(self, key: str, text: str) -> None:
        self.texts[key] = text

    def blocking_key_value_get(self, key: str, _limit_msec: int) -> str:
        return self.texts[key]


@pytest.mark.parametrize(
    ("resolved", "told", "expected"),
    [
        (LAN, {}, LAN),
        ("127.0.1.1", {"p1": "unknown", "p2": LAN}, LAN),
        (None, {"p1": LAN}, LAN),
        ("127.0.1.1", {"p1": "unknown", "p2": "unknown"}, "127.0.1.1"),
        (None, {"p1": "unknown", "p2": "unknown"}, None),
    ],
    ids=["name", "debian", "unresolved", "one host", "nobody knows"],
)
def test_a_host_asks_the_others_for_the_address_of_its_name(
    monkeypatch, resolved, told, expected
):
    """/etc/hosts of Debian gives a host's own name 127.0.1.1, which other hosts cannot
    reach."""
    process = network.ProcessInfo(3, 0, "node1:7000", "MOEJAX")
    monkeypatch.setattr(network, "resolve", lambda _: resolved)
    store = Store(**told)
    monkeypatch.setattr(network.coordinator, "client", lambda: store)
    assert network._reached_coordinator(process, 1) == expected
    known = resolved if resolved == LAN else "unknown"
    assert store.texts["moejax/coordinator_address/0"] == known


def test_jax_takes_an_address_for_gloo():
    """The private API that train/launch/network.py uses is that of jax 0.11.2."""
    from jax._src import distributed, xla_bridge
    from jax._src.lib import _jax

    why = (
        f"jax {jax.__version__} gives gloo its address in another way than jax 0.11.2: "
        "change listen_with_gloo in train/launch/network.py"
    )
    assert "hostname: str" in (_jax.make_gloo_tcp_collectives.__doc__ or ""), why
    assert "collectives" in inspect.signature(xla_bridge.make_cpu_client).parameters, (
        why
    )
    given = inspect.signature(xla_bridge.register_backend_factory).parameters
    assert {"priority", "fail_quietly"} <= set(given), why
    assert hasattr(distributed.global_state, "client"), why
    assert jax.config.jax_cpu_collectives_implementation == "gloo", why


@pytest.mark.long
@pytest.mark.root
@pytest.mark.parametrize("own", ["127.0.1.1", "10.77.0.1"], ids=["debian", "usual"])
def test_several_hosts_listen_where_they_reach_the_coordinator(tmp_path, own):
    """Two hosts have two processes each, and each host's own name resolves to loopback.

    The certificate names the run by a URI, not the coordinator's host.
    """
    (tmp_path / "stop").touch()
    program = [sys.executable, str(ROOT / "tests" / "support" / "meeting.py")]
    environ = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
    environ |= {"MOEJAX_COORDINATOR": "node1:61999", "MOEJAX_NUM_PROCESSES": "4"}
    environ |= new_certificate(tmp_path / "tls") | {URI_PREFIX: "spiffe://moejax/"}
    del environ["XLA_FLAGS"]
    with hold_lock(60):
        remove_leftovers()
        testbed.set_up(2, None)
        try:
            for dc in range(2):
                first = testbed.address(0) if dc else own
                hosts = f"127.0.0.1 localhost {socket.gethostname()}\n{first} node1\n"
                (testbed.ETC_NETNS / testbed.dc_name(dc) / "hosts").write_text(hosts)
            pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
            processes = [
                subprocess.Popen(
                    [*testbed.prefix(index // 2), *program, str(tmp_path)],
                    env=environ | {"MOEJAX_PROCESS_ID": str(index)},
                    text=True,
                    **pipes,
                )
                for index in range(4)
            ]
            texts = [process.communicate(timeout=60)[0] for process in processes]
        finally:
            remove_leftovers()
    for index, (process, text) in enumerate(zip(processes, texts, strict=True)):
        assert process.returncode == 0, text
        assert f"listens on {testbed.address(index // 2)}\n" in text
    usual = "the coordinator listens on 10.77.0.1:61999, without TLS"
    debian = "the coordinator listens on all interfaces, port 61999, without TLS"
    assert (debian if own == "127.0.1.1" else usual) in texts[0]
