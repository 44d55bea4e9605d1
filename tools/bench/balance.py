"""Time train steps of one configuration under several balancing policies, in turns.

    python tools/bench/balance.py --gin_file=configs/testbed_skew.gin \\
        --variant home --variant "micromoe: Balance.policy = 'micromoe'" --json

Each variant is the trainer's own step with a state of its own. All variants see the
same tokens and routing. A policy plans once, before the first turn, from the load of
the first step; it has not seen the loads of later steps. All variants are compiled and
run once before process 0 makes the file --ready and the turns begin. A step's time is
that of the slowest process. Exit codes: 0 done, 2 bad input, 3 the machine failed.
"""

import argparse
import dataclasses
import pathlib
import statistics
import sys
import time

import numpy as np

sys.path[0] = str(pathlib.Path(__file__).resolve().parents[2])

from moejax.perf.traffic import over_mean  # noqa: E402
from tools.bench.timer import in_turns  # noqa: E402
from tools.launch.arguments import add_gin_flags, new_parser  # noqa: E402
from train.config import gin_reader  # noqa: E402
from train.launch.cluster import add_flags, cluster_flags  # noqa: E402
from train.launch.program import DONE, emit, guarded, start  # noqa: E402

SETTLING = 1
"""Number of turns after --ready that do not count."""


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    return guarded(lambda: work(args), as_json=args.json)


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = new_parser(__doc__)
    add = parser.add_argument
    add_gin_flags(parser)
    add(
        "--variant",
        action="append",
        required=True,
        help="name and settings of a variant: 'name: Class.field = value; ..';"
        " repeated for each variant",
    )
    add(
        "--turns",
        type=int,
        default=5,
        help="number of steps of each variant that count",
    )
    add(
        "--ready",
        type=pathlib.Path,
        help="file that process 0 makes when the turns begin (default: none)",
    )
    add_flags(parser)
    return parser.parse_args(argv)


def work(args: argparse.Namespace) -> int:
    if args.turns < 1:
        raise ValueError(f"--turns {args.turns} must be at least 1")
    cfgs = {}
    for text in args.variant:
        name, _, params = text.partition(":")
        own = [param.strip() for param in params.split(";") if param.strip()]
        cfgs[name.strip()] = gin_reader.load(args.gin_file, [*args.gin_param, *own])
    start(next(iter(cfgs.values())), cluster_flags(args))
    from train.launch.processes import is_first, wait_for_all

    # Gloo's processes wait at most 30 s for one another when they first meet. They meet
    # here, before their compile times differ: some find programs in JAX's cache.
    wait_for_all("begun")
    variants = {}
    for name, cfg in cfgs.items():
        variants[name] = make_variant(cfg)
        variants[name].step()
        if is_first():
            print(f"{name}: compiled and run once", flush=True)
    wait_for_all("compiled")
    if args.ready is not None and is_first():
        args.ready.touch()
    timed = measure(variants, args.turns)
    record = {name: make_record(*columns) for name, columns in timed.items()}
    if is_first():
        emit(record, args.json)
    return DONE


def make_record(secs: list[float], ratios: list[float], rounds: list[int]) -> dict:
    """Summarize a variant from the time, load ratio and rounds of each of its steps."""
    return {
        "step_sec": [round(sec, 4) for sec in secs],
        "median_sec": round(statistics.median(secs), 4),
        "device_max_over_mean": round(statistics.median(ratios), 4),
        "rounds": max(rounds),
    }


def measure(variants: dict, turns: int) -> dict[str, tuple[list, list, list]]:
    """Run the variants in turns, and return the seconds, device max/mean and rounds of
    each variant's steps."""
    from train.launch.processes import is_first, wait_for_all

    timed = {name: ([], [], []) for name in variants}
    for turn, name in in_turns(variants, turns, SETTLING):
        wait_for_all(f"{name} {turn}")
        row = variants[name].step()
        if turn < 0:
            continue
        for column, value in zip(timed[name], row):
            column.append(value)
        if is_first():
            print(f"turn {turn} {name}: {row[0]:.3f} s, device max/mean {row[1]:.2f}")
    return timed


class Variant:
    """A compiled train step and its state."""

    def __init__(self, run, state, placement, windows) -> None:
        self._run, self._state = run, state
        self._placement, self._windows = placement, windows

    def step(self) -> tuple[float, float, int]:
        """Run one step, and return the seconds of the slowest process, the device
        max/mean of the least even layer, and the number of rounds."""
        import jax
        from jax.experimental import multihost_utils

        begin = time.perf_counter()
        self._state, metrics = self._run(self._state, self._placement, self._windows)
        jax.block_until_ready((self._state, metrics))
        sec = np.float32(time.perf_counter() - begin)
        slowest = multihost_utils.process_allgather(sec).max()
        rows_lw = np.asarray(metrics.routing.rows_lw)
        ratio = float(over_mean(rows_lw).max())
        return float(slowest), ratio, int(np.max(metrics.routing.rounds_l))


def make_variant(cfg) -> Variant:
    """Return the compiled train step of a configuration, with a new state."""
    from moejax.axes import make_mesh
    from moejax.resolve.resolved import resolve
    from train.step.compiled import make_model, on_devices, trace_train_step
    from train.step.state import init_state

    # A step that is run alone and timed carries all rows itself.
    dispatch = dataclasses.replace(cfg.dispatch, overflow="rounds")
    cfg = dataclasses.replace(cfg, dispatch=dispatch)
    mesh = make_mesh(cfg.mesh)
    model = make_model(resolve(cfg, mesh))
    run = trace_train_step(model).lower().compile()
    state = init_state(model.run, model.optimizer, model.layout.store)
    placement = on_devices(make_plan(model.run), model.layout, mesh)
    return Variant(run, state, placement, make_windows(cfg, mesh))


def make_plan(run):
    """Return the policy's plan for the recorded load of step 0, or the home plan."""
    from moejax.balance.policies import POLICIES
    from moejax.moe import recorded

    cfg, layout, current = run.cfg, run.layout, run.home_plan()
    if cfg.balance.policy == "home":
        return current
    sizes = (cfg.model.num_moe_layers, cfg.moe.num_experts, cfg.moe.top_k)
    chance_le = recorded.loads(cfg.recorded, *sizes)[0]
    each = cfg.train.batch_size * cfg.data.seq_len / layout.num_devices
    load_lwe = np.repeat(each * chance_le[:, None], layout.num_devices, axis=1)
    plan = POLICIES[cfg.balance.policy].plan
    return plan(load_lwe, layout, run.cost, current).validate(layout)


@dataclasses.dataclass(frozen=True)
class RandomWindows:
    """A source of windows of random tokens, the same in every process."""

    vocab_size: int
    seq_len: int

    def rows(self, index: int, first: int, last: int):
        """Return the rows `first` to `last` - 1 of batch `index`."""
        from moejax.moe.types import Windows

        shape = (last - first, self.seq_len + 1)
        rng = np.random.default_rng((index, first))
        token_bt = rng.integers(0, self.vocab_size, shape, dtype=np.int32)
        position_bt = np.tile(np.arange(shape[1], dtype=np.int32), (shape[0], 1))
        return Windows(token_bt, position_bt)


def make_windows(cfg, mesh):
    """Return the windows of the first step on the devices of the mesh."""
    from train.data.feed import feed
    from train.step.step import window_sharding

    source = RandomWindows(cfg.model.vocab_size, cfg.data.seq_len)
    sizes = (cfg.train.batch_size, cfg.train.accumulate_steps)
    return feed(source, 0, *sizes, window_sharding(mesh))


if __name__ == "__main__":
    sys.exit(main())
