"""A corpus without downloads: Python source of the packages that moejax depends on.

The texts are in the order of packages and paths. In the training text and in the
held-out text, the byte 0x00 begins each document but the first.
"""

import hashlib
import logging
from importlib import metadata

import numpy as np

PINNED = {
    "jax": (
        "0.11.2",
        "e14b18c7a88bf10af0983b1a3d6f689252e37e928586495fe557a5848af85c10",
    ),
    "flax": (
        "0.12.12",
        "fdedd563f3fccd98519599c9f2c9a2140b4aa581f07822221089ea2ef5cb890a",
    ),
    "optax": (
        "0.2.8",
        "6bd7c7a39065a3bfa7325bfaefcb5717fdc6ea9e98a5f08b978a959acdfc02f6",
    ),
    "orbax-checkpoint": (
        "0.12.8",
        "be12be48acaa5f9f06863e2c754996255bde33fdd5f82e246590ae9f6724e9d7",
    ),
    "grain": (
        "0.2.18",
        "110a8826dc7728f0503449e4de4a53d401dad38736b63a4b36b16aa326a91e07",
    ),
}
"""Version of each package in constraints.txt, and the sha256 of its .py files."""

_log = logging.getLogger(__name__)


def read_pysrc(held_out_every: int) -> tuple[str, np.ndarray, np.ndarray]:
    """Return the sha256, the training bytes and the held-out bytes, uint8.

    The documents are the .py files that the packages of PINNED list in their RECORD.
    Some files are equal (an __init__.py with only a licence). Each text is used once,
    so that none is both trained on and held out. Raises ValueError when the files of an
    installed package are not those of its release.
    """
    sources = {package: read_package(package) for package in PINNED}
    shas = {package: sha256_sum(files) for package, files in sources.items()}
    _check_release(shas)
    texts = dict.fromkeys(t for files in sources.values() for t in files.values())
    texts.pop(b"", None)
    assert not any(b"\0" in text for text in texts), "0x00 separates documents"
    documents = [text + b"\0" for text in texts]
    held_out = documents[held_out_every - 1 :: held_out_every]
    del documents[held_out_every - 1 :: held_out_every]
    sha256 = hashlib.sha256("".join(shas.values()).encode()).hexdigest()
    return sha256, _join(documents), _join(held_out)


def read_package(package: str) -> dict[str, bytes]:
    """Return a package's .py files by path, sorted by path, without importing it.

    A file that RECORD lists but the disk lacks is left out, so the sha256 then differs.
    """
    distribution = metadata.distribution(package)
    sources = [file for file in distribution.files or () if file.suffix == ".py"]
    if not sources:
        raise ValueError(
            f"pysrc: the installation of {package} lists no .py files, as an "
            f"editable one does: reinstall {package} from a wheel"
        )
    sources.sort(key=lambda file: file.as_posix())
    return {file.as_posix(): file.read_binary() for file in sources}


def sha256_sum(files: dict[str, bytes]) -> str:
    """Return the sha256 of all paths, sizes and contents, in order."""
    digest = hashlib.sha256()
    for path, text in files.items():
        digest.update(f"{path} {len(text)}\n".encode())
        digest.update(text)
    return digest.hexdigest()


def _check_release(shas: dict[str, str]) -> None:
    """Raise ValueError for changed files; log a warning for other package versions."""
    versions = {package: metadata.version(package) for package in shas}
    others = [p for p in shas if versions[p] != PINNED[p][0]]
    changed = [p for p in shas if p not in others and shas[p] != PINNED[p][1]]
    if changed:
        names = " ".join(f"{package}=={versions[package]}" for package in changed)
        raise ValueError(
            f"pysrc: the installed .py files of {names} are not those of the release "
            f"(sha256 {', '.join(shas[p][:12] for p in changed)} instead of "
            f"{', '.join(PINNED[p][1][:12] for p in changed)}): reinstall with "
            f"pip install --force-reinstall --no-deps {names}"
        )
    if others:
        _log.warning(
            "the text of pysrc differs from the documented one: %s",
            ", ".join(f"{p} is {versions[p]}, not {PINNED[p][0]}" for p in others),
        )


def _join(documents: list[bytes]) -> np.ndarray:
    return np.frombuffer(b"".join(documents), np.uint8)
