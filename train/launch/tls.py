"""Check the certificates with which processes of a run prove that they belong to it.

jax reads their files from the variables named here, and the rendezvous then uses mutual
TLS: the coordinator and each process present a certificate, and refuse a peer whose
certificate is not signed by the authority in JAX_MTLS_CA_FILE. Wrong files would show
only as a rendezvous that fails after Processes.init_sec, so they are tried out here
first. This module does not import jax.
"""

import os
import ssl
from collections.abc import Mapping

CERT, KEY = "JAX_MTLS_CERT_FILE", "JAX_MTLS_KEY_FILE"
AUTHORITY = "JAX_MTLS_CA_FILE"
URI_PREFIX = "JAX_MTLS_PEER_URI_PREFIX"
VARIABLES = (CERT, KEY, AUTHORITY, URI_PREFIX)
"""Variables of jax 0.11: files with this process's certificate and key, and with the
authority's certificate; and, optionally, what a URI in a peer's certificate must begin
with. With a prefix the certificate need not name the coordinator's host."""


def uses_tls(environ: Mapping[str, str], coordinator_host: str | None) -> bool:
    """Return whether the variables ask for mutual TLS.

    `coordinator_host` is the host that the certificate must name; None if this process
    is not the coordinator. Raises ValueError, in one line, unless the three files are
    all named or none is, and another process with the same authority would accept the
    certificate.
    """
    if not any(name in environ for name in VARIABLES):
        return False
    missing = [name for name in VARIABLES[:3] if not environ.get(name)]
    if missing:
        given = " and ".join(name for name in VARIABLES if environ.get(name))
        raise ValueError(
            f"{given or 'mutual TLS'} is set, but not {' and '.join(missing)}: name a "
            "certificate, its key and an authority for mutual TLS, or unset all"
        )
    prefix = environ.get(URI_PREFIX)
    if prefix is not None and not prefix.endswith("/"):
        raise ValueError(
            f"{URI_PREFIX}={prefix!r} must end with '/': add it, so that longer names "
            "of other hosts do not begin with it"
        )
    _try_out(environ, None if prefix else coordinator_host)
    return True


def _try_out(environ: Mapping[str, str], host: str | None) -> None:
    """Let the certificate connect to itself; raise ValueError where a peer would refuse
    it."""
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    server.verify_mode = ssl.CERT_REQUIRED
    if host is None:  # the certificate need not be one of a server
        client.check_hostname, client.verify_mode = False, ssl.CERT_NONE
    for context in (server, client):
        _load(context, environ)
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    accepting = server.wrap_bio(to_server, to_client, server_side=True)
    ends = [client.wrap_bio(to_client, to_server, server_hostname=host), accepting]
    try:
        while ends:
            ends = [end for end in ends if not _is_connected(end)]
    except ssl.SSLError as error:
        cause = getattr(error, "verify_message", "") or error.reason
        raise ValueError(
            f"{CERT}={environ[CERT]} would be refused by the other processes, whose "
            f"authority is {AUTHORITY}={environ[AUTHORITY]}: {cause}; correct it"
        ) from error
    prefix, names = environ.get(URI_PREFIX, ""), accepting.getpeercert()
    uris = [x for kind, x in names.get("subjectAltName", ()) if kind == "URI"]
    if prefix and not any(uri.startswith(prefix) for uri in uris):
        raise ValueError(
            f"{CERT}={environ[CERT]} names no URI that begins with {prefix} "
            f"({URI_PREFIX}), but {uris}: correct one of the two"
        )


def _load(context: ssl.SSLContext, environ: Mapping[str, str]) -> None:
    """Load certificate, key and authority; raise ValueError for a file that is none."""
    for name in VARIABLES[:3]:
        try:
            with open(environ[name], "rb"):
                pass
        except OSError as error:
            raise ValueError(
                f"{name}={environ[name]} cannot be read ({os.strerror(error.errno)}): "
                "name a readable file in PEM format"
            ) from error
    name = AUTHORITY
    try:
        context.load_verify_locations(environ[AUTHORITY])
        name = CERT
        # A key with a password fails here, instead of asking for it.
        context.load_cert_chain(environ[CERT], environ[KEY], password=lambda: "")
    except ssl.SSLError as error:
        both = f"{CERT}={environ[CERT]} with {KEY}={environ[KEY]}"
        what = f"{name}={environ[name]}" if name == AUTHORITY else both
        raise ValueError(
            f"{what} cannot be used ({error.reason or 'not PEM'}): name a certificate, "
            "its own key without a password, and the certificate of the authority"
        ) from error


def _is_connected(end: ssl.SSLObject) -> bool:
    """Continue a handshake, and return whether it is complete."""
    try:
        end.do_handshake()
    except ssl.SSLWantReadError:
        return False
    return True
