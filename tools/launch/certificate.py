"""Make a throw-away certificate, by which the workers of one launch know one another.

The certificate is its own authority, and all workers share it and its key: who has the
key is a worker. It is made by the `openssl` command (1.1.1 or newer), in about 10 ms.
"""

import contextlib
import pathlib
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Mapping

from tools.launch.lines import say
from train.launch.tls import AUTHORITY, CERT, KEY, VARIABLES

DAYS = 3650
"""Days for which a certificate is valid: longer than any launch."""
LIMIT_SEC = 10
NAMES = "subjectAltName=IP:127.0.0.1,IP:::1,DNS:localhost"


@contextlib.contextmanager
def throw_away_certificate(
    num_processes: int, environ: Mapping[str, str]
) -> Iterator[dict[str, str]]:
    """Yield the variables that make workers meet with mutual TLS, by a certificate that
    is removed at the end of the `with` block.

    Its directory can be read by this user alone. There are no variables where one
    process meets nobody, where the user has set certificates, and, with a line that
    says so, where no certificate can be made.
    """
    if num_processes == 1 or any(name in environ for name in VARIABLES):
        yield {}
        return
    with tempfile.TemporaryDirectory(prefix="moejax-tls-") as name:
        folder = pathlib.Path(name)
        if fault := _make(folder):
            say(f"the processes meet WITHOUT TLS on loopback: {fault}")
            yield {}
            return
        cert, key = str(folder / "cert.pem"), str(folder / "key.pem")
        yield {CERT: cert, KEY: key, AUTHORITY: cert}


def _make(folder: pathlib.Path) -> str | None:
    """Write cert.pem and key.pem (mode 0600) into a folder; return what went wrong."""
    openssl = shutil.which("openssl")
    if openssl is None:
        return "there is no openssl on the PATH"
    words = [openssl, "req", "-config", "/dev/null", "-x509", "-newkey", "ec"]
    words += ["-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    words += ["-days", str(DAYS), "-subj", "/CN=moejax", "-addext", NAMES]
    words += ["-addext", "basicConstraints=critical,CA:TRUE"]
    words += ["-keyout", str(folder / "key.pem"), "-out", str(folder / "cert.pem")]
    try:
        subprocess.run(words, capture_output=True, check=True, timeout=LIMIT_SEC)
    except subprocess.CalledProcessError as error:
        lines = error.stderr.decode(errors="replace").split("\n")
        return f"openssl ended with {error.returncode}: {lines[0]}"
    except subprocess.TimeoutExpired:
        return f"openssl took longer than {LIMIT_SEC} s"
    except OSError as error:
        return f"{openssl} cannot be run ({error.strerror})"
    return None
