"""Certificates for tests of mutual TLS, made by the openssl command."""

import pathlib
import subprocess

CERT, KEY = "JAX_MTLS_CERT_FILE", "JAX_MTLS_KEY_FILE"
AUTHORITY, URI_PREFIX = "JAX_MTLS_CA_FILE", "JAX_MTLS_PEER_URI_PREFIX"
NAMES = "subjectAltName=DNS:node1,URI:spiffe://moejax/run"


def openssl(*words: str) -> None:
    """Run the openssl command."""
    subprocess.run(["openssl", *words], check=True, capture_output=True)


def new_certificate(folder: pathlib.Path) -> dict[str, str]:
    """Make a certificate that is its own authority, and return its variables."""
    folder.mkdir()
    cert, key = str(folder / "cert.pem"), str(folder / "key.pem")
    words = ["-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1"]
    words += ["-nodes", "-subj", "/CN=test", "-addext", NAMES]
    openssl("req", *words, "-keyout", key, "-out", cert)
    return {CERT: cert, KEY: key, AUTHORITY: cert}
