"""Network namespaces as data centres (DCs), with links of a given rate between them.

    moejax-dc0  uplink ──┐                    every cable is a veth pair; the bucket on
    moejax-dc1  uplink ──┼── bridge           its DC end shapes what leaves, the one on
    moejax-dc2  uplink ──┘   in moejax-hub    the hub's end what comes in

Processes of one DC talk over its loopback interface, which is not shaped. Both ends of
each cable are in namespaces of the testbed, so links vanish with the namespaces. What
is removed is found by its name alone: 'moejax-hub', 'moejax-dc<number>' and the folders
of those names in /etc/netns.
"""

import json
import os
import pathlib
import re
import shutil
import signal
import socket
import subprocess
import time

HUB = "moejax-hub"
UPLINK = "uplink"
"""Name of the interface that leaves a DC, the same in each of them."""
MAX_DCS = 64
ETC_NETNS = pathlib.Path("/etc/netns")
BURST_SEC, MIN_BURST_BYTES = 0.001, 16 * 1024
"""Size of a token bucket: the bytes of 1 ms, at least 16 KiB.

That much passes at once. It must be small beside the messages of a layer, or
collectives that are measured alone look faster than the link."""
QUEUE_BYTES = 32 * 2**20
"""Size of the queue before a bucket: so deep that TCP slows down and loses nothing."""
END_SEC = 30.0
"""Time for processes to end after SIGKILL: on a busy machine that took seconds."""
_OURS = re.compile(r"moejax-(hub|dc\d{1,3})")


class Unavailable(OSError):
    """Error raised when the testbed needs something that this machine or user does not
    have. Its text is one line."""


def dc_name(dc: int) -> str:
    """Return the name of a DC's namespace."""
    return f"moejax-dc{dc}"


def address(dc: int) -> str:
    """Return the IPv4 address of a DC, which all its processes share."""
    return f"10.77.0.{dc + 1}"


def set_up(dcs: int, rate_mbit: float | None) -> None:
    """Make a network namespace, a virtual cable and a rate limit for each of `dcs` data
    centres (DCs).

    The rate is that of each uplink in Mb/s; None leaves links unshaped. Raises
    Unavailable. What was made before the error remains, for `remove`.
    """
    if os.geteuid() != 0:
        raise Unavailable("network namespaces need root")
    for tool in ("ip", "tc"):
        if shutil.which(tool) is None:
            raise Unavailable(f"there is no {tool} (iproute2)")
    _call(f"ip netns add {HUB}")
    _call(f"ip -n {HUB} link add hub type bridge")
    _call(f"ip -n {HUB} link set hub up")
    for dc in range(dcs):
        name, port = dc_name(dc), f"dc{dc}"
        _call(f"ip netns add {name}")
        _call(f"ip -n {name} link set lo up")
        _call(f"ip link add {UPLINK} netns {name} type veth peer {port} netns {HUB}")
        _call(f"ip -n {name} address add {address(dc)}/24 dev {UPLINK}")
        _call(f"ip -n {name} link set {UPLINK} up")
        _call(f"ip -n {HUB} link set {port} master hub up")
        if rate_mbit is not None:
            set_rate(dc, rate_mbit)
        # Gloo listens on the address that the machine's own name resolves to.
        folder = ETC_NETNS / name
        folder.mkdir(parents=True, exist_ok=True)
        hosts = f"127.0.0.1 localhost\n{address(dc)} {socket.gethostname()}\n"
        (folder / "hosts").write_text(hosts)


def set_rate(dc: int, rate_mbit: float) -> None:
    """Give the uplink of a DC another rate in Mb/s, in both directions."""
    bucket = f"root tbf {_bucket(rate_mbit)}"
    _call(f"tc -n {dc_name(dc)} qdisc replace dev {UPLINK} {bucket}")
    _call(f"tc -n {HUB} qdisc replace dev dc{dc} {bucket}")


def prefix(dc: int) -> tuple[str, ...]:
    """Return the words that, before a command, run it in a DC, in the same process."""
    return ("ip", "netns", "exec", dc_name(dc))


def sent_bytes(dcs: int) -> tuple[int, ...]:
    """Return the bytes that have left each DC over its uplink, headers included.

    They are those of /sys/class/net/uplink/statistics/tx_bytes in its namespace.
    """
    sent = []
    for dc in range(dcs):
        link = json.loads(_call(f"ip -n {dc_name(dc)} -s -j link show {UPLINK}"))[0]
        sent.append(link["stats64"]["tx"]["bytes"])
    return tuple(sent)


def leftovers() -> list[str]:
    """Return the names of the testbed's namespaces and folders in /etc/netns that
    exist."""
    namespaces = [x for x in _namespaces() if _OURS.fullmatch(x)]
    return namespaces + [str(folder) for folder in _folders()]


def remove() -> list[str]:
    """End the processes in the testbed's namespaces, remove these and their folders,
    and return the names of what was removed."""
    removed = leftovers()
    for name in _namespaces():
        if _OURS.fullmatch(name):
            pids = _call(f"ip netns pids {name}").split()
            end_processes([int(pid) for pid in pids])
            _call(f"ip netns delete {name}")
    folders = _folders()
    for folder in folders:
        (folder / "hosts").unlink(missing_ok=True)
        folder.rmdir()
    if folders and not any(ETC_NETNS.iterdir()):
        ETC_NETNS.rmdir()
    return removed


def end_processes(pids: list[int], limit_sec: float = END_SEC) -> None:
    """Kill processes with SIGKILL, and return when they are gone. Raises OSError if one
    is still there after the limit."""
    for pid in pids:
        _kill(pid)
    end_sec = time.monotonic() + limit_sec
    while left := [pid for pid in pids if _is_alive(pid)]:
        if time.monotonic() > end_sec:
            raise OSError(
                f"processes {left} outlive SIGKILL: they are waiting in the kernel"
            )
        time.sleep(0.01)


def _namespaces() -> list[str]:
    """Return the names of all namespaces of this machine that `ip netns` lists."""
    if shutil.which("ip") is None:
        return []
    return [line.split()[0] for line in _call("ip netns list").splitlines() if line]


def _folders() -> list[pathlib.Path]:
    if not ETC_NETNS.is_dir():
        return []
    return [x for x in sorted(ETC_NETNS.iterdir()) if _OURS.fullmatch(x.name)]


def _bucket(rate_mbit: float) -> str:
    bits_per_sec = round(rate_mbit * 1e6)
    burst_bytes = max(MIN_BURST_BYTES, round(bits_per_sec / 8 * BURST_SEC))
    return f"rate {bits_per_sec}bit burst {burst_bytes} limit {QUEUE_BYTES}"


def _call(words: str) -> str:
    """Run a command, and return its stdout.

    The command has a process group of its own, so that Ctrl-C reaches this program
    alone. Raises Unavailable with the command's error message if it fails.
    """
    result = subprocess.run(
        words.split(), capture_output=True, text=True, check=False, process_group=0
    )
    if result.returncode:
        complaint = " ".join(result.stderr.split()) or f"exit code {result.returncode}"
        raise Unavailable(f"{words}: {complaint}")
    return result.stdout


def _kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return


def _is_alive(pid: int) -> bool:
    try:
        stat = pathlib.Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return stat.rpartition(") ")[2][0] not in "ZX"
