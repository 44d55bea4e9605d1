"""Train a Mixture-of-Experts language model from gin files.

    python train/main.py --gin_file=configs/tiny_cpu.gin \\
        --gin_param='Train.num_steps = 50'

Exit codes: 0 done, 2 bad input, 3 diverged or the disk did not take what was written,
75 stopped by a signal with everything saved.
"""

import argparse
import json
import os
import pathlib
import sys

ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path[0] = str(
    ROOT
)  # this folder would offer data.py, loss.py, .. as top-level names

from moejax.config import Config  # noqa: E402
from train import gin_config  # noqa: E402
from train.allocator import restart_with_huge_pages  # noqa: E402

DONE, BAD_INPUT, FAILED, PREEMPTED = 0, 2, 3, 75

COLLECTIVE_FLAGS = (
    "--xla_cpu_collective_call_terminate_timeout_seconds=600",
    "--xla_cpu_collective_call_warn_stuck_timeout_seconds=120",
)
"""Eight simulated devices that share two cores can wait longer for one another than the
40 seconds after which XLA:CPU aborts."""


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    try:
        cfg = gin_config.load(args.gin_file, args.gin_param)
        if argv is None and cfg.train.num_simulated_devices:
            restart_with_huge_pages()
        set_up_backend(cfg)
        return run(cfg, args)
    except (ValueError, NotImplementedError) as error:
        return refuse(error, BAD_INPUT, args)
    except OSError as error:
        return refuse(error, FAILED, args)


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--gin_file", action="append", required=True, help="a later one wins")
    add("--gin_param", action="append", default=[], help="'Train.num_steps = 50'")
    add("--run_dir", help="default: Train.run_dir, else runs/<name of the first file>")
    add(
        "--fresh", action="store_true", help="archive the run that is there, start anew"
    )
    add("--dry_run", action="store_true", help="print sizes and plan, run nothing")
    add("--json", action="store_true", help="end with one JSON object on the last line")
    return parser.parse_args(argv)


def run_directory(cfg: Config, args: argparse.Namespace) -> pathlib.Path:
    named = args.run_dir or cfg.train.run_dir
    return pathlib.Path(
        named or pathlib.Path("runs") / pathlib.Path(args.gin_file[0]).stem
    )


def set_up_backend(cfg: Config) -> None:
    """Flags that must stand before jax starts; what the user has set stays."""
    flags = [os.environ.get("XLA_FLAGS", ""), *COLLECTIVE_FLAGS]
    if cfg.train.num_simulated_devices:
        count = cfg.train.num_simulated_devices
        flags.append(f"--xla_force_host_platform_device_count={count}")
        os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ["XLA_FLAGS"] = " ".join(flags).strip()
    os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(ROOT / ".cache" / "jax"))


def run(cfg: Config, args: argparse.Namespace) -> int:
    """Everything that needs jax."""
    from train.checkpoint import CheckpointError
    from train.dry_run import dry_run
    from train.loop import Diverged, train
    from train.prepare import prepare
    from train.run_dir import claim
    from train.summary import finished_summary, summarise

    if args.dry_run:
        emit(dry_run(cfg), args.json)
        return DONE
    job = prepare(cfg)
    with claim(run_directory(cfg, args), fresh=args.fresh) as run_dir:
        if run_dir.archived:
            print(f"the run that was here is now {run_dir.archived}")
        done = finished_summary(run_dir.path, job)
        if done is not None:
            say_finished(done, cfg)
            emit(done, args.json)
            return DONE
        text = gin_config.render(cfg)
        print(text, flush=True)
        try:
            outcome = train(job, run_dir, text)
        except (CheckpointError, Diverged) as error:
            return refuse(error, FAILED, args)
        if outcome.evaluation is None:
            step = int(outcome.state.step)
            print(f"stopped by signal {outcome.signal} at step {step}; all is saved")
            record = {"step": step, "signal": outcome.signal}
            emit(record | {"run_dir": str(run_dir.path)}, args.json)
            return PREEMPTED
        emit(summarise(job, outcome, run_dir.path), args.json)
    return DONE


def say_finished(done: dict, cfg: Config) -> None:
    loss, num_steps = done["eval_loss"], cfg.train.num_steps
    loss = "not finite" if loss is None else f"{loss:.4f}"
    print(
        f"{done['run_dir']} is finished: {done['step']} of {num_steps} steps, held-out "
        f"loss {loss}. Go on with --gin_param='Train.num_steps = {2 * num_steps}', "
        "start afresh with --fresh (this run is kept, renamed), or name another "
        "--run_dir."
    )


def refuse(error: Exception, code: int, args: argparse.Namespace) -> int:
    say_error(error)
    emit({"error": one_line(error), "exit_code": code}, args.json)
    return code


def emit(record: dict, as_json: bool) -> None:
    """One JSON object as the last line, for scripts."""
    if as_json:
        print(json.dumps(record), flush=True)


def say_error(error: Exception) -> None:
    print("error: " + one_line(error), file=sys.stderr, flush=True)


def one_line(error: Exception) -> str:
    return " ".join(str(error).split())


if __name__ == "__main__":
    sys.exit(main())
