"""What the process of the trackers is told when it starts, and which trackers exist."""

import dataclasses
import importlib.machinery
import pathlib
import sys
from typing import Any

ROOT = pathlib.Path(__file__).resolve().parents[3]
OWN_PACKAGES = ROOT / ".trackers"
"""Folder in which `make trackers` installs packages; those of the environment win."""
PACKAGES = {
    "tensorboard": ("tensorboardX", "pip install tensorboardX"),
    "wandb": ("wandb", "make trackers, or pip install wandb"),
    "mlflow": ("mlflow", "make trackers, or pip install mlflow"),
}
"""Package that each tracker needs, and how to install it."""


@dataclasses.dataclass(frozen=True)
class Setup:
    """What trackers know of a run when it starts."""

    names: tuple[str, ...]
    """Trackers to feed."""
    run_dir: str
    step: int
    """Last step that is done."""
    config_text: str
    """The configuration as config.gin has it."""
    config: dict[str, Any]
    """Its fields by name, such as 'moe.top_k'."""


def parse_names(text: str) -> tuple[str, ...]:
    """Return the names in a list such as 'tensorboard,wandb'. Raises ValueError for one
    that is no tracker.

    >>> parse_names("tensorboard,wandb")
    ('tensorboard', 'wandb')
    """
    names = tuple(dict.fromkeys(name.strip() for name in text.split(",") if text))
    for name in names:
        if name not in PACKAGES:
            raise ValueError(
                f"--track={text}: {name!r} is no tracker: give some of "
                f"{','.join(PACKAGES)}"
            )
    return names


def require_installed(names: tuple[str, ...]) -> None:
    """Raise ValueError if the package of a tracker is not installed. None of them is
    imported."""
    for name in names:
        package, how = PACKAGES[name]
        if not is_installed(package):
            raise ValueError(
                f"--track={name} needs the package {package}, which is not installed: "
                f"{how}, or leave {name} out"
            )


def missing_trackers() -> str | None:
    """Return why not all trackers can be tested, or None if they can."""
    packages = [package for package, _ in PACKAGES.values()]
    missing = [package for package in packages if not is_installed(package)]
    if not missing:
        return None
    return f"{' and '.join(missing)} not installed: run `make trackers`"


def is_installed(package: str) -> bool:
    """Return whether a package can be imported, without importing it."""
    path = [*sys.path, str(OWN_PACKAGES)]
    return importlib.machinery.PathFinder.find_spec(package, path) is not None


def flat_fields(config: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return the fields of nested dicts by dotted names.

    >>> flat_fields({"moe": {"top_k": 2}})
    {'moe.top_k': 2}
    """
    fields = {}
    for name, value in config.items():
        if isinstance(value, dict):
            fields |= flat_fields(value, f"{prefix}{name}.")
        else:
            fields[prefix + name] = value
    return fields
