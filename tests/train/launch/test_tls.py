"""Test that certificates which cannot be used are refused at once, in one line, and
that strangers without one are refused."""

import contextlib
import os
import shutil
import socket
import ssl
import subprocess
import sys

import pytest

from moejax.config import Config
from tests.support.certificates import new_certificate, openssl
from tests.support.meeting import Meeting
from train.launch.cluster import ProcessInfo
from train.launch.processes import join
from train.launch.tls import AUTHORITY, CERT, KEY, URI_PREFIX, uses_tls

STRANGER = """
import sys, jax
jax.distributed.initialize(
    sys.argv[1], 2, 1, cluster_detection_method="deactivate", initialization_timeout=1
)
print("joined")
"""


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """The variables of a certificate for the host node1."""
    return new_certificate(tmp_path_factory.mktemp("tls") / "files")


def test_certificates_are_asked_for_by_three_variables(files):
    assert not uses_tls({}, "node1")
    assert uses_tls(files, "node1")
    assert uses_tls(files, None)


@pytest.mark.parametrize("name", [CERT, KEY, AUTHORITY])
def test_a_part_of_the_variables_is_refused(files, name):
    rest = {key: text for key, text in files.items() if key != name}
    with pytest.raises(ValueError, match=f"is set, but not {name}: name a cert"):
        uses_tls(rest, None)
    with pytest.raises(ValueError, match=f"is set, but not {name}: name a cert"):
        uses_tls(rest | {name: ""}, None)
    with pytest.raises(ValueError, match=f"{name}=/no/file cannot be read .No such"):
        uses_tls(files | {name: "/no/file"}, None)


def test_a_prefix_alone_or_without_its_slash_is_refused(files):
    with pytest.raises(ValueError, match="is set, but not"):
        uses_tls({URI_PREFIX: "spiffe://moejax/"}, None)
    with pytest.raises(ValueError, match="must end with '/'"):
        uses_tls(files | {URI_PREFIX: "spiffe://moejax"}, None)


def test_the_coordinators_certificate_names_its_host_or_needs_a_prefix(files):
    with pytest.raises(ValueError, match=r"Hostname mismatch.*not valid for 'node2'"):
        uses_tls(files, "node2")
    assert uses_tls(files, None), "only the coordinator's host is checked"
    assert uses_tls(files | {URI_PREFIX: "spiffe://moejax/"}, "node2")
    with pytest.raises(ValueError, match="names no URI that begins with spiffe://a/"):
        uses_tls(files | {URI_PREFIX: "spiffe://a/"}, "node2")


@pytest.mark.parametrize("index", [0, 1], ids=["coordinator", "other"])
def test_a_certificate_of_another_authority_is_refused(files, tmp_path, index):
    other = new_certificate(tmp_path / "other")
    mixed = files | {AUTHORITY: other[AUTHORITY]}
    with pytest.raises(ValueError, match="would be refused by the other processes"):
        uses_tls(mixed, None if index else "node1")


def test_an_expired_certificate_is_refused(tmp_path):
    old = new_certificate(tmp_path / "old")
    words = ["-in", old[CERT], "-signkey", old[KEY], "-days", "-1", "-out", old[CERT]]
    openssl("x509", *words)
    with pytest.raises(ValueError, match="certificate has expired"):
        uses_tls(old, None)


def test_files_of_another_kind_are_refused(files, tmp_path):
    other = new_certificate(tmp_path / "other")
    with pytest.raises(ValueError, match=r"with .*cannot be used .*MISMATCH"):
        uses_tls(files | {KEY: other[KEY]}, None)
    garbage = tmp_path / "garbage"
    garbage.write_bytes(bytes(range(256)))
    for name in (CERT, KEY, AUTHORITY):
        with pytest.raises(ValueError, match=f"{name}={garbage}.* cannot be used"):
            uses_tls(files | {name: str(garbage)}, None)
    locked = shutil.copy(files[KEY], tmp_path / "locked.pem")
    openssl("ec", "-aes128", "-passout", "pass:x", "-in", files[KEY], "-out", locked)
    with pytest.raises(ValueError, match=r"locked.pem cannot be used"):
        uses_tls(files | {KEY: locked}, None)


def test_a_process_refuses_them_before_it_meets_the_others(monkeypatch):
    monkeypatch.setenv(CERT, "/no/file")
    process = ProcessInfo(2, 1, "127.0.0.1:7000", "MOEJAX")
    with pytest.raises(
        ValueError, match=f"^{CERT} is set, but not {KEY} and {AUTHORITY}"
    ):
        join(Config(), process)


@pytest.mark.long
def test_strangers_are_refused_and_the_processes_go_on(files, tmp_path, monkeypatch):
    """Strangers are processes of jax without a certificate and with one of another
    authority, a client of TLS without a certificate, and one that sends bytes at
    random."""
    strange = new_certificate(tmp_path / "strange")
    for name, value in (files | {URI_PREFIX: "spiffe://moejax/"}).items():
        monkeypatch.setenv(name, value)
    with Meeting(tmp_path) as meeting:
        host, _, port = meeting.coordinator.rpartition(":")
        jaxes = [start_stranger(meeting.coordinator, x) for x in ({}, strange)]
        for text in (bytes(range(256)) * 100, b"GET / HTTP/1.1\r\n\r\n"):
            with socket.create_connection((host, int(port)), timeout=60) as connection:
                connection.sendall(text)
                with contextlib.suppress(ConnectionResetError):
                    connection.recv(100)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        context.set_alpn_protocols(["h2"])
        with socket.create_connection((host, int(port)), timeout=60) as connection:
            # A server that accepts its client begins with its settings of HTTP/2.
            assert context.wrap_socket(connection).recv(100) == b""
        for process in jaxes:
            out, _ = process.communicate(timeout=120)
            assert process.returncode != 0
            assert "joined" not in out
        code, text, record = meeting.end()
    assert code == 0, text
    assert (record["restarts"], record["attempts"][0]["codes"]) == (0, [0, 0])


def start_stranger(coordinator: str, variables: dict) -> subprocess.Popen:
    """Start a process that says that it is process 1."""
    words = [sys.executable, "-c", STRANGER, coordinator]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    own = (CERT, KEY, AUTHORITY, URI_PREFIX)
    environ = {name: x for name, x in os.environ.items() if name not in own}
    environ |= {"JAX_PLATFORMS": "cpu"} | variables
    return subprocess.Popen(words, env=environ, **pipes)
