"""Loads of experts by source device, sample after sample: recorded ones, or a synthetic
skew. NumPy only.

    zipf:1.0      load ~ 1 / rank^1.0; which expert has which rank differs by layer
    one_hot       one expert has all
    rotating:0.5  one expert has half, another one every 10 samples; the rest is even
    burst:0.5     the same, but 10 samples of one hot expert, then 10 even ones
    uniform       even, but for chance
"""

import argparse
import dataclasses
import pathlib
import zipfile
import zlib

import numpy as np

SYNTHETIC = {"zipf": 1.0, "one_hot": None, "rotating": 0.5, "burst": 0.5}
SYNTHETIC |= {"uniform": None}
"""The number that stands behind the colon when none is given; None takes none."""
PERIOD_SAMPLES = 10
NUM_LAYERS = 2
ROWS_PER_DEVICE = 16384
"""Of a synthetic sample: as many as the recorded one has (4 micro-batches of 4096)."""


@dataclasses.dataclass(frozen=True)
class Loads:
    """Rows from source device w to expert e, in sample t of layer l: float64 [t, l, w,
    e]. `layers` are the names of the layers: their numbers in the model."""

    name: str
    load_tlwe: np.ndarray
    layers: tuple[int, ...]


def add_options(parser: argparse.ArgumentParser):
    """The group of which one must be given."""
    add = parser.add_argument
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--trace", type=pathlib.Path, help=".npz of recorded loads")
    source.add_argument(
        "--synthetic", metavar="KIND", help=f"{', '.join(SYNTHETIC)}; zipf:1.2"
    )
    add("--array", default="tokens", help="of the .npz file: tokens")
    add("--devices", type=int, default=16, help="on the expert axis: 16")
    add("--experts", type=int, help="a synthetic load's: two per device")
    add("--samples", type=int, default=50, help="a synthetic load's: 50")
    add("--seed", type=int, default=0, help="a synthetic load's: 0")
    add("--layers", help="some layers of the trace, by number: 2,6 (default: all)")
    return source


def from_options(args: argparse.Namespace) -> Loads:
    """Raises ValueError when they are not of --devices, or a layer is not there."""
    if args.devices < 1:
        raise ValueError(f"--devices {args.devices} must be at least 1")
    if args.trace is not None:
        loads = read_trace(args.trace, args.array)
        if args.experts not in (None, loads.load_tlwe.shape[3]):
            raise ValueError(
                f"{args.trace} is of {loads.load_tlwe.shape[3]} experts, and --experts "
                f"is {args.experts}: leave --experts out with a trace"
            )
    else:
        experts = 2 * args.devices if args.experts is None else args.experts
        loads = synthetic(args.synthetic, args.devices, experts, args.samples,
                          args.seed)  # fmt: skip
    found = loads.load_tlwe.shape[2]
    if found != args.devices:
        raise ValueError(
            f"{loads.name} is of {found} devices, and --devices is {args.devices}: "
            f"give --devices {found}, or a trace of {args.devices} devices"
        )
    return some_layers(loads, args.layers) if args.layers else loads


def read_trace(path: pathlib.Path, array: str = "tokens") -> Loads:
    """`array` is counts [samples, layers, devices, experts], or with micro-batches,
    which are summed, before the devices. `layer`, where it is there, names the layers.

    Raises ValueError, one line, for a file that is missing, damaged or of other shape.
    """
    arrays = _arrays(path, array)
    counts = arrays[array]
    if counts.ndim == 5:
        counts = counts.sum(axis=2, dtype=np.float64)
    if counts.ndim != 4 or not counts.size or counts.dtype.kind not in "uif":
        raise ValueError(
            f"{path}: '{array}' is {counts.dtype} {list(counts.shape)}, and counts "
            "[samples, layers, devices, experts] are needed, or [samples, layers, "
            "micro-batches, devices, experts]"
        )
    load_tlwe = counts.astype(np.float64)
    if not (np.isfinite(load_tlwe) & (load_tlwe >= 0)).all():
        raise ValueError(
            f"{path}: '{array}' holds negative numbers or NaN: counts are needed"
        )
    num_layers = load_tlwe.shape[1]
    layer_l = arrays.get("layer", np.arange(0))
    if layer_l.shape != (num_layers,) or len(set(layer_l.tolist())) < num_layers:
        layer_l = np.arange(num_layers)
    return Loads(path.name, load_tlwe, tuple(int(layer) for layer in layer_l))


def _arrays(path: pathlib.Path, array: str) -> dict[str, np.ndarray]:
    if not path.is_file():
        raise ValueError(f"no trace {path}: give the path of an .npz file")
    if not zipfile.is_zipfile(path):
        raise ValueError(f"{path} is damaged or no .npz file: write one with np.savez")
    try:
        with np.load(path, allow_pickle=False) as file:
            names = sorted(file)
            arrays = {name: file[name] for name in (array, "layer") if name in names}
    except (ValueError, zipfile.BadZipFile, zlib.error, EOFError, OSError) as error:
        raise ValueError(f"{path} is damaged ({error}): get the file again") from error
    if array not in arrays:
        raise ValueError(f"{path} holds {', '.join(names)}, and not --array {array}")
    return arrays


def some_layers(loads: Loads, names: str) -> Loads:
    """Those of `names`, numbers with commas between, in that order."""
    known = {str(layer): index for index, layer in enumerate(loads.layers)}
    wanted = [name.strip() for name in names.split(",")]
    missing = [name for name in wanted if name not in known]
    if missing:
        raise ValueError(
            f"--layers {names}: no layer {missing[0]!r} in {loads.name}, which has "
            f"{', '.join(known)}"
        )
    index_l = [known[name] for name in wanted]
    layers = tuple(loads.layers[index] for index in index_l)
    return Loads(loads.name, loads.load_tlwe[:, index_l], layers)


def synthetic(
    kind: str, devices: int, experts: int, samples: int, seed: int = 0
) -> Loads:
    """Each device draws ROWS_PER_DEVICE rows by the same law, so counts differ by
    chance between devices and samples as those of a router do."""
    name, _, text = kind.partition(":")
    if name not in SYNTHETIC or (text and SYNTHETIC[name] is None):
        raise ValueError(
            f"--synthetic {kind} is no load: use one of {', '.join(SYNTHETIC)}, a "
            "number behind zipf:1.0, rotating:0.5 or burst:0.5"
        )
    if experts < 2 or samples < 2:
        raise ValueError(
            f"--experts {experts} and --samples {samples} must be at least 2"
        )
    number = _number(kind, text) if text else SYNTHETIC[name]
    rng = np.random.default_rng(seed)
    load_tlwe = np.empty((samples, NUM_LAYERS, devices, experts))
    for layer in range(NUM_LAYERS):
        order_e = rng.permutation(experts)
        for sample in range(samples):
            chance_e = _chances(name, number, sample, experts)[order_e]
            load_tlwe[sample, layer] = rng.multinomial(
                ROWS_PER_DEVICE, chance_e, size=devices
            )
    return Loads(kind, load_tlwe, tuple(range(NUM_LAYERS)))


def _chances(name: str, number: float, sample: int, experts: int) -> np.ndarray:
    phase = sample // PERIOD_SAMPLES
    chance_e = np.ones(experts)
    if name == "zipf":
        chance_e = np.arange(1.0, experts + 1) ** -number
    elif name == "one_hot":
        chance_e = np.eye(experts)[0]
    elif name == "rotating" or (name == "burst" and phase % 2 == 0):
        chance_e = np.full(experts, (1 - number) / (experts - 1))
        chance_e[phase % experts if name == "rotating" else 0] = number
    return chance_e / chance_e.sum()


def _number(kind: str, text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = -1.0
    if not 0 <= number <= (1 if not kind.startswith("zipf") else 100):
        raise ValueError(
            f"--synthetic {kind}: the number behind the colon must be a share from 0 "
            "to 1, or zipf's exponent"
        )
    return number
