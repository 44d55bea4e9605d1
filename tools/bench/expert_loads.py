"""Loads of experts by source device and sample: recorded ones, or a synthetic skew.
NumPy only.

    zipf:1.0      the load of the expert of rank n is proportional to 1 / n^1.0; ranks
                  are drawn for each layer
    one_hot       one expert gets all rows
    rotating:0.5  one expert gets half of the rows, and another one every 10 samples;
                  the other experts share the rest evenly
    burst:0.5     one expert gets half of the rows for 10 samples, then loads are even
                  for 10 samples
    uniform       loads are even, up to chance
"""

import argparse
import dataclasses
import pathlib

import numpy as np

from moejax.moe.array_file import names_in_npz, read_npz
from train.logs.record_lines import LOADS, read_records

SYNTHETIC = {"zipf": 1.0, "one_hot": None, "rotating": 0.5, "burst": 0.5}
SYNTHETIC |= {"uniform": None}
"""Default of the number behind the colon, by kind; None for a kind without a number."""
PERIOD_SAMPLES = 10
NUM_LAYERS = 2
MAX_COUNT = 1e15
"""Largest count of a trace, so that sums of counts are exact."""
ROWS_PER_DEVICE = 16384
"""Rows of each source device in a synthetic sample: as many as in the recorded trace,
which has 4 micro-batches of 4096."""


@dataclasses.dataclass(frozen=True)
class Loads:
    """Rows from each source device to each expert, for several samples and layers."""

    name: str
    load_tlwe: np.ndarray
    """Rows from device w to expert e in sample t of layer l: float64 [t, l, w, e]."""
    layers: tuple[int, ...]
    """Numbers of the layers in the model."""


def add_options(parser: argparse.ArgumentParser):
    """Add the options of loads, and return the group of sources, of which one must be
    given."""
    add = parser.add_argument
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument(
        "--trace", type=pathlib.Path, help=".npz file with recorded loads"
    )
    source.add_argument(
        "--synthetic",
        metavar="KIND",
        help=f"synthetic loads: {', '.join(SYNTHETIC)}, with a number as in zipf:1.2",
    )
    add("--array", default="tokens", help="name of the array in the --trace file")
    add(
        "--devices",
        type=int,
        help="number of devices on the expert axis (default: those of the loads; 16 "
        "for synthetic ones)",
    )
    add(
        "--experts",
        type=int,
        help="number of experts of a synthetic load (default: two per device)",
    )
    add(
        "--samples",
        type=int,
        default=50,
        help="number of samples of a synthetic load",
    )
    add("--seed", type=int, default=0, help="random seed of a synthetic load")
    add(
        "--layers",
        help="layers to use, by their numbers, as 2,6 (default: all)",
    )
    return source


def from_options(args: argparse.Namespace) -> Loads:
    """Return the loads that the command line asks for: those of a trace, of a run, or
    synthetic ones. `args.devices` is set to their number of devices.

    Raises ValueError when they are not of --devices devices or --experts experts, or
    when a layer does not exist.
    """
    if args.devices is not None and args.devices < 1:
        raise ValueError(f"--devices {args.devices} must be at least 1")
    if args.trace is not None:
        loads = read_trace(args.trace, args.array)
    elif args.synthetic is not None:
        devices = args.devices or 16
        experts = 2 * devices if args.experts is None else args.experts
        loads = synthetic(args.synthetic, devices, experts, args.samples, args.seed)
    else:
        loads = read_run(args.run)
    for option, found in zip(("devices", "experts"), loads.load_tlwe.shape[2:]):
        if getattr(args, option) not in (None, found):
            raise ValueError(
                f"{loads.name} has {found} {option}, but --{option} is "
                f"{getattr(args, option)}: leave --{option} out"
            )
    args.devices = loads.load_tlwe.shape[2]
    return some_layers(loads, args.layers) if args.layers else loads


def read_trace(path: pathlib.Path, array: str = "tokens") -> Loads:
    """Read recorded expert loads from an .npz file.

    `array` names counts [samples, layers, devices, experts], or [samples, layers,
    micro-batches, devices, experts], which are summed over micro-batches. The array
    `layer`, if there is one, holds the numbers of the layers. Raises ValueError, with
    one line, for a file that is missing, damaged or of another shape.
    """
    arrays = read_npz(path, [array, "layer"])
    if array not in arrays:
        names = ", ".join(names_in_npz(path))
        raise ValueError(f"{path} holds {names}, but not --array {array}")
    counts = arrays[array]
    if counts.ndim == 5:
        counts = counts.sum(axis=2, dtype=np.float64)
    if counts.ndim != 4 or not counts.size:
        raise ValueError(
            f"{path}: '{array}' is {counts.dtype} {list(counts.shape)}, but must be "
            "counts [samples, layers, devices, experts], or [samples, layers, "
            "micro-batches, devices, experts]"
        )
    load_tlwe = counts.astype(np.float64, copy=False)
    check_counts(load_tlwe, f"{path}: '{array}'")
    num_layers = load_tlwe.shape[1]
    layer_l = arrays.get("layer", np.arange(0))
    is_named = layer_l.dtype.kind in "iu" and layer_l.shape == (num_layers,)
    if not is_named or len(set(layer_l.tolist())) < num_layers:
        layer_l = np.arange(num_layers)
    return Loads(path.name, load_tlwe, tuple(int(layer) for layer in layer_l))


def read_run(folder: pathlib.Path) -> Loads:
    """Read the loads by source device that a run with Train.log_sources recorded, one
    sample for each recorded step. Raises ValueError, with one line, for a folder
    without any, and for records of different shapes."""
    path = folder / LOADS
    tables = [record.get("load_lwe") for record in read_records(path)]
    if not tables:
        raise ValueError(
            f"{path} holds no loads: train with Train.log_sources = True, for at "
            "least Train.log_load_every_steps steps"
        )
    try:
        load_tlwe = np.array(tables, np.float64)
        is_whole = load_tlwe.ndim == 4 and load_tlwe.size > 0
    except (ValueError, TypeError):
        is_whole = False
    if not is_whole:
        raise ValueError(
            f"{path}: load_lwe must be a table [layers, devices, experts] of one shape"
        )
    check_counts(load_tlwe, f"{path}: load_lwe")
    return Loads(str(folder), load_tlwe, tuple(range(load_tlwe.shape[1])))


def check_counts(load_tlwe: np.ndarray, name: str) -> None:
    """Raise ValueError unless all loads are counts; `name` says where they are from."""
    if not (load_tlwe.min() >= 0 and load_tlwe.max() <= MAX_COUNT):  # NaN fails too
        raise ValueError(
            f"{name} holds negative numbers, NaN or numbers above {MAX_COUNT:.0e}: it "
            "must hold counts"
        )


def some_layers(loads: Loads, names: str) -> Loads:
    """Return the loads of the layers in `names`, numbers with commas between, in that
    order. Raises ValueError for a layer that does not exist."""
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
    """Return synthetic loads of NUM_LAYERS layers.

    Each device draws ROWS_PER_DEVICE rows from the same distribution, so counts differ
    by chance between devices and samples, as those of a router do. Raises ValueError
    for an unknown kind or a number out of range.
    """
    name, _, text = kind.partition(":")
    if name not in SYNTHETIC or (text and SYNTHETIC[name] is None):
        raise ValueError(
            f"{kind!r} is no synthetic load: use one of {', '.join(SYNTHETIC)}, or one "
            "with a number, as zipf:1.0, rotating:0.5 or burst:0.5"
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
    """Return the probability of each expert in one sample of a synthetic load."""
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
            f"synthetic load {kind!r}: the number behind the colon must be a share "
            "from 0 to 1, or zipf's exponent"
        )
    return number
