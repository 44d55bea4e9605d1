"""Choose the addresses on which a run of several processes listens.

Two services of jax listen: the coordinator in process 0, and gloo, which carries the
collectives of CPUs, in every process. Left alone, the coordinator listens on all
interfaces, and gloo on the address that the host's name resolves to. Here both listen
on one address: loopback where the coordinator's address is loopback, else that of the
interface over which the coordinator is reached.

jax has no public way to give gloo an address. `listen_with_gloo` is the only user of
the private one (jax 0.11.2).
"""

import socket
from collections.abc import Mapping

from train.launch import coordinator
from train.launch.cluster import ProcessInfo, is_loopback

ADDRESS_KEY = "coordinator_address"
BIND_ADDRESS = "JAX_COORDINATOR_BIND_ADDRESS"
"""jax's variable with the address on which the coordinator is to listen."""


def bind_address(address: str, environ: Mapping[str, str]) -> str:
    """Return HOST:PORT on which the coordinator of process 0 listens.

    It is JAX_COORDINATOR_BIND_ADDRESS where that is set, and the coordinator's own
    address where this machine has it. A name that is unknown here, belongs to another
    machine, or resolves to loopback (as /etc/hosts of Debian has it) does not tell how
    other hosts reach this one; then the result is [::]:PORT, all interfaces.
    """
    if BIND_ADDRESS in environ:
        return environ[BIND_ADDRESS]
    host, port = split(address)
    if is_loopback(host):
        return address
    resolved = resolve(host)
    if not resolved or is_loopback(resolved) or not _is_local(resolved):
        return f"[::]:{port}"
    return f"[{resolved}]:{port}" if ":" in resolved else f"{resolved}:{port}"


def listen_with_gloo(process: ProcessInfo, limit_sec: int) -> str | None:
    """Make gloo listen on one address of this host, and return it.

    All processes call this after they have met and before the first device is touched.
    A process waits `limit_sec` seconds at most for what others know of the coordinator.
    Returns None where gloo keeps jax's choice: collectives of CPUs are not gloo's, or
    no process can resolve the coordinator's name.
    """
    import jax
    from jax._src import xla_bridge
    from jax._src.lib import _jax

    if jax.config.jax_cpu_collectives_implementation != "gloo":
        return None
    target = _reached_coordinator(process, limit_sec)
    address = target and local_address(target)
    if not address:
        return None

    def make_client():
        gloo = _jax.make_gloo_tcp_collectives(
            distributed_client=coordinator.client(), hostname=address
        )
        return xla_bridge.make_cpu_client(collectives=gloo)

    xla_bridge.register_backend_factory(
        "cpu", make_client, priority=0, fail_quietly=False
    )
    return address


def _reached_coordinator(process: ProcessInfo, limit_sec: int) -> str | None:
    """Return the address at which processes reach the coordinator; None if no process
    knows one.

    On the coordinator's own host its name may resolve to loopback. Other hosts then
    know the address, so every process tells what it knows.
    """
    host, _ = split(process.coordinator)
    address = resolve(host)
    if is_loopback(host):
        return address
    known = address if address and not is_loopback(address) else ""
    coordinator.put(f"{ADDRESS_KEY}/{process.index}", known or "unknown")
    if known:
        return known
    for index in range(process.count):
        other = coordinator.wait_for(f"{ADDRESS_KEY}/{index}", limit_sec * 1000)
        if other != "unknown":
            return other
    return address


def split(address: str) -> tuple[str, int]:
    """Return the host and the port of HOST:PORT, without brackets of IPv6."""
    host, _, port = address.rpartition(":")
    return host.removeprefix("[").removesuffix("]"), int(port)


def resolve(host: str) -> str | None:
    """Return an address of a host, IPv4 before IPv6; None where its name is unknown.

    gloo connects addresses of one family only, so all processes must choose the same.
    """
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_DGRAM)
    except OSError:
        return None
    return min(found, key=lambda x: x[0] != socket.AF_INET)[4][0]


def local_address(address: str) -> str | None:
    """Return the address of this host from which it reaches `address`, itself if it is
    of this host; None without a route. Nothing is sent."""
    if _is_local(address):
        return address
    with _udp_socket(address) as probe:
        try:
            probe.connect((address, 9))  # any port: UDP only looks up the route
        except OSError:
            return None
        return probe.getsockname()[0]


def _is_local(address: str) -> bool:
    """Return whether an address belongs to this host."""
    with _udp_socket(address) as probe:
        try:
            probe.bind((address, 0))
        except OSError:
            return False
    return True


def _udp_socket(address: str) -> socket.socket:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    return socket.socket(family, socket.SOCK_DGRAM)
