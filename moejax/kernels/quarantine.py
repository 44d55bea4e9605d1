"""Kernels that computed something wrong on a kind of device, and are not used there.

A kernel is quarantined in one of two forms:

    second  its second forms (Tiles.is_second_form) are not used; its first form is
    first   the kernel is not used: the choice takes the next implementation

tools/bringup.py writes what it finds to the device's file. A run that finds out by
itself holds a kernel for its own process. Only 'auto' heeds it: a caller that names an
implementation of the grouped product gets that one.
"""

import datetime
from collections.abc import Iterable
from typing import Literal, NamedTuple, get_args

from moejax.kernels import device_file
from moejax.kernels.tuning import PASSES

Form = Literal["first", "second"]
FORMS: tuple[Form, ...] = get_args(Form)
KERNELS = (*PASSES, "permute", "attention", "attention_cudnn", "water_fill")
"""Names of the kernels: each pass of the grouped product by itself, the row
permutations together, both passes of attention by the Hopper kernels and by cuDNN."""


class Quarantine(NamedTuple):
    """Why a kernel, or its second forms, are not used."""

    form: Form
    """'second' where only the second forms are wrong."""
    why: str
    """What was wrong, as one clause."""


_held: dict[str, Quarantine] = {}
"""Quarantines of this process alone."""


def find(kernel: str, device_kind: str) -> Quarantine | None:
    """Return the quarantine of a kernel on a kind of device, or None.

    Of that of this process and that of the device's file, one of the first form comes
    before one of the second. Raises ValueError for a damaged file, or for an unknown
    kernel.
    """
    _check(kernel)
    stored = device_file.known(device_kind).get("quarantined", {}).get(kernel)
    found = [_held.get(kernel), stored and _parse(kernel, stored, device_kind)]
    return min(filter(None, found), key=lambda each: each.form, default=None)


def unusable(kernels: Iterable[str], device_kind: str) -> dict[str, str]:
    """Return the reasons, by kernel, of those that are not used on a kind of device in
    any form."""
    found = {kernel: find(kernel, device_kind) for kernel in kernels}
    return {k: each.why for k, each in found.items() if each and each.form == "first"}


def why_unusable(kernel: str, device_kind: str) -> str | None:
    """Return the reason why a kernel is not used on a kind of device, as one clause, or
    None."""
    why = unusable([kernel], device_kind).get(kernel)
    return why and f"quarantined on {device_kind}: {why}"


def hold(kernel: str, form: Form, why: str) -> None:
    """Quarantine a kernel for the programs that this process traces from now on."""
    _check(kernel, form)
    _held[kernel] = Quarantine(form, why)


def release() -> None:
    """End all quarantines of this process alone."""
    _held.clear()


def store(device_kind: str, kernel: str, form: Form, why: str, **about: str) -> None:
    """Quarantine a kernel in the device's file. `about` says more: versions, a commit.

    Raises OSError if the file cannot be written, ValueError if it is damaged.
    """
    _check(kernel, form)
    path = device_file.path_of(device_kind)
    record = device_file.load(path, device_kind)
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    entry = {"form": form, "why": why, "when": now, **about}
    record["quarantined"] = record["quarantined"] | {kernel: entry}
    device_file.save(path, record)


def _parse(kernel: str, stored: dict, device_kind: str) -> Quarantine:
    """Return a quarantine of the device's file. Raises ValueError for a damaged one."""
    try:
        found = Quarantine(stored["form"], str(stored["why"]))
        _check(kernel, found.form)
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"{device_file.path_of(device_kind)} must say form and why of the "
            f"quarantined {kernel}, and has {stored!r}: take the entry out, or run "
            "tools/bringup.py again"
        ) from error
    return found


def _check(kernel: str, form: str = "first") -> None:
    """Raise ValueError for an unknown kernel or form."""
    if kernel not in KERNELS:
        raise ValueError(f"kernel={kernel!r} is not one of {', '.join(KERNELS)}")
    if form not in FORMS:
        raise ValueError(f"form={form!r} is not one of {', '.join(FORMS)}")
