"""Train a Mixture-of-Experts language model from gin files.

    python train/main.py --gin_file=configs/tiny_cpu.gin \\
        --gin_param='Train.num_steps = 50'

Exit codes: 0 the run is finished; 2 bad input; 3 the loss diverged, a write to the
disk failed, or devices hold different bits of one parameter; 75 stopped by a signal,
with everything saved. tools/launch/local.py, SLURM, Open MPI or Kubernetes start a run
of several processes (docs/processes.md).
"""

import argparse
import os
import pathlib
import sys
import time
from collections.abc import Callable

ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path[0] = str(ROOT)  # this folder's modules are train.x, never top-level names

from moejax.config import Config  # noqa: E402
from moejax.perf import target  # noqa: E402
from train.config import gin_reader  # noqa: E402
from train.config.from_hf import notes_on_folder, with_kept_tokenizer  # noqa: E402
from train.launch.agreement import (  # noqa: E402
    device_facts,
    program_facts,
    require_same,
)
from train.launch.cluster import ATTEMPT  # noqa: E402
from train.launch.processes import from_first_process, is_first  # noqa: E402
from train.launch.program import (  # noqa: E402
    DONE,
    FAILED,
    PREEMPTED,
    emit,
    end,
    guarded,
    restart_with_huge_pages,
    say_loudly,
    start,
    start_of_process,
)
from train.logs.profile import HELP, parse_steps  # noqa: E402
from train.logs.trackers import parse_names, require_installed  # noqa: E402
from train.messages import visible  # noqa: E402

DEFAULT_TARGET = "h100"
"""GPU of a dry run, where devices are not simulated and none is named."""


def main(argv: list[str] | None = None) -> int:
    """Train, or do what the arguments ask for instead; return the exit code."""
    args, is_program = parse(argv), argv is None
    begun_sec = start_of_process() if is_program else time.monotonic()
    with guarded(as_json=args.json) as ending:
        check_arguments(args)
        cfg = gin_reader.load(args.gin_file, args.gin_param)
        profile_steps, track = parse_steps(args.profile_steps), parse_names(args.track)
        if is_program and cfg.train.num_simulated_devices:
            restart_with_huge_pages()

        # Set the flags of jax, which is imported from here on, and meet the other
        # processes of the run. All of them must have the same program to run.
        start(cfg)
        is_first_attempt = os.environ.get(ATTEMPT, "0") == "0"
        fresh = args.fresh and is_first_attempt  # a restart continues its own run
        from_step = args.from_step if is_first_attempt else None
        facts = {
            "configuration": gin_reader.render(cfg),
            "--from_step": str(from_step),
            "--dry_run": str(args.dry_run),
            "--check": str(args.check),
            "--track": ",".join(track),
        }
        require_same("program", facts | program_facts())
        if args.dry_run:
            if is_first():
                show_dry_run(cfg, args)
            return DONE
        if args.check:
            return check_devices(cfg, args)

        from train.checkpoint.identity import check as check_identity
        from train.checkpoint.record import go_back
        from train.doctor.doctor import require_right
        from train.job import prepare, ragged_lines
        from train.logs.run_dir import share
        from train.loop import train
        from train.summary import finished_summary, summarise

        # Resolve the configuration, and build the model and the data. The run
        # directory is not touched before it is clear that the run can begin.
        if track:
            from_first_process(lambda: require_installed(track))
        path = args.run_dir or cfg.train.run_dir
        path = pathlib.Path(
            path or pathlib.Path("runs") / pathlib.Path(args.gin_file[0]).stem
        )
        cfg, is_new = look_back(cfg, path, fresh)
        job = prepare(cfg, is_new=is_new)
        resolved = job.model.run
        require_same("job", job.facts | device_facts())
        for line in ragged_lines(resolved) if is_first() else ():
            say_loudly(line)
        if resolved.mesh.devices.flat[0].platform == "gpu":
            start_sec = time.monotonic()
            num_checks, sec = require_right(resolved), time.monotonic() - start_sec
            if is_first():
                print(
                    f"doctor: {num_checks} checks are right, in {sec:.1f} s", flush=True
                )

        # Claim the run directory, train in it, and report.
        with share(path, fresh=fresh) as run_dir:
            if run_dir.archived:
                print(f"the run that was here is now {run_dir.archived}")
            if from_step is not None:
                for line in from_first_process(
                    lambda: go_back(
                        run_dir.path,
                        from_step,
                        lambda meta: check_identity(meta, cfg, job.meta["data"]),
                    )
                ):
                    print(line)
            summary = from_first_process(lambda: finished_summary(run_dir.path, job))
            if summary is not None:
                say_finished(summary, cfg)
                emit(summary, args.json)
                return DONE
            print_config(cfg, args, f"all of them are in {run_dir.path / 'config.gin'}")
            outcome = train(
                job,
                run_dir,
                track=track,
                profile_steps=profile_steps,
                begun_sec=begun_sec,
                is_plain=args.plain,
            )
            if outcome.evaluation is None:
                step = int(outcome.state.step)
                print(
                    f"stopped by signal {outcome.signal} at step {step}; all is saved"
                )
                record = {"step": step, "signal": outcome.signal}
                emit(record | {"run_dir": str(run_dir.path)}, args.json)
                return PREEMPTED
            emit(summarise(job, outcome, run_dir.path), args.json)
            return DONE
    return ending.code


def check_arguments(args: argparse.Namespace) -> None:
    """Raise ValueError for arguments that contradict one another."""
    if args.num_devices is not None and not args.dry_run:
        raise ValueError(
            f"--num_devices={args.num_devices} is for --dry_run, which proposes "
            "meshes: give both; a run takes the devices of Mesh.*"
        )
    if args.target is not None and not args.dry_run:
        raise ValueError(
            f"--target={args.target} is for --dry_run: give both; a run takes the "
            "devices of this machine"
        )
    if args.target is not None and args.num_devices is not None:
        raise ValueError(
            f"--target={args.target} says whether a mesh fits, and --num_devices="
            f"{args.num_devices} asks for meshes: give one after the other"
        )
    if args.fresh and args.from_step is not None:
        raise ValueError(
            "--fresh starts from step 0, and --from_step from a checkpoint: give one"
        )
    if args.check and (args.dry_run or args.fresh or args.from_step is not None):
        raise ValueError(
            "--check compares kernels and collectives, and trains nothing: give it "
            "without --dry_run, --fresh and --from_step"
        )


def parse(argv: list[str] | None) -> argparse.Namespace:
    """Return the arguments of the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    _add_run(parser.add_argument)
    _add_check(parser.add_argument)
    _add_dry_run(parser.add_argument)
    _add_output(parser.add_argument)
    return parser.parse_args(argv)


def _add_run(add: Callable) -> None:
    """Add the arguments that say what is trained, where and from which step."""
    add(
        "--gin_file",
        action="append",
        required=True,
        metavar="FILE",
        help="configuration file; may be given several times, and a later file wins "
        "(required)",
    )
    add(
        "--gin_param",
        action="append",
        default=[],
        metavar="BINDING",
        help="one binding, such as 'Train.num_steps = 50'; may be given several times, "
        "and wins over files (default: none)",
    )
    add(
        "--run_dir",
        metavar="DIR",
        help="directory of checkpoints, metrics and logs (default: Train.run_dir, else "
        "runs/<name of the first gin file>)",
    )
    add(
        "--fresh",
        action="store_true",
        help="rename the run that is in the directory, and start from step 0 (default: "
        "continue that run)",
    )
    add(
        "--from_step",
        type=int,
        metavar="N",
        help="continue from the checkpoint of step N, and rename later ones (default: "
        "from the newest)",
    )


def _add_check(add: Callable) -> None:
    """Add the argument of a check of the devices."""
    add(
        "--check",
        action="store_true",
        help="compare each kernel and each collective that the run would use with its "
        "definition on the devices, print a table, and train nothing; exit code 3 if "
        "something is wrong (default: only GPUs are checked, before a run)",
    )


def _add_dry_run(add: Callable) -> None:
    """Add the arguments of a run that trains nothing."""
    add(
        "--dry_run",
        action="store_true",
        help="print whether the run fits, the predicted time of a step, parameters, "
        "bytes per device and the plan, and run nothing (default: train)",
    )
    add(
        "--num_devices",
        type=int,
        metavar="N",
        help="with --dry_run: print the valid meshes of N devices, best first, each "
        "with its --gin_param flags and bytes per device (default: the sizes of the "
        "configured mesh)",
    )
    add(
        "--target",
        metavar="GPU",
        help="with --dry_run: the GPU whose memory and kernels count, "
        f"{', '.join(target.names())}, or a file like those of moejax/perf/targets "
        "(default: h100, or this machine where devices are simulated)",
    )


def _add_output(add: Callable) -> None:
    """Add the arguments that say what is printed and recorded."""
    add(
        "--print_config",
        action="store_true",
        help="print every field of the configuration (default: those that differ from "
        "their defaults)",
    )
    add(
        "--json",
        action="store_true",
        help="print one JSON object as the last line (default: text alone)",
    )
    add(
        "--plain",
        action="store_true",
        help="print lines on a terminal too, as to a file (default: a bar there)",
    )
    add(
        "--track",
        default="",
        metavar="NAMES",
        help="send the records to these trackers too, separated by commas: tensorboard "
        "(events in RUN_DIR/tensorboard), wandb, mlflow (default: none)",
    )
    add(
        "--profile_steps",
        default="",
        metavar="A:B",
        help=f"{HELP} (default: no steps)",
    )


def print_config(cfg: Config, args: argparse.Namespace, whole: str) -> None:
    """Print what differs from the defaults, and `whole`: where to find the rest."""
    if args.print_config:
        print(gin_reader.render(cfg), flush=True)
        return
    print(f"configuration: the fields that differ from their defaults; {whole}\n")
    print(gin_reader.render(cfg, only_changed=True), flush=True)
    for note in notes_on_folder(cfg.model.from_hf):
        print(f"note: {visible(note)}", flush=True)


def look_back(cfg: Config, path: pathlib.Path, fresh: bool) -> tuple[Config, bool]:
    """Return the configuration, and whether the run is new: without `fresh` too, if its
    directory has no checkpoint with a whole record. A run that goes on may get its own
    copy of a tokenizer that is gone.

    Raises ValueError for a new run that came from a published model and names none.
    """
    from train.checkpoint.from_hf import require_origin
    from train.checkpoint.record import newest_meta

    def recorded_tokenizer() -> str | None:
        meta = None if fresh else newest_meta(path / "checkpoints")
        if meta is None:
            require_origin(cfg, path)
            return None
        return meta.get("config", {}).get("data", {}).get("tokenizer", "")

    recorded = from_first_process(recorded_tokenizer)
    if recorded is None:
        return cfg, True
    say = say_loudly if is_first() else lambda _: None
    return with_kept_tokenizer(cfg, path, recorded, say), False


def show_dry_run(cfg: Config, args: argparse.Namespace) -> None:
    """Print what a run of the configuration, or meshes for it, would need, and then the
    configuration."""
    from train.dry_run import dry_run, show_meshes

    gpu = find_target(cfg, args.target)
    if args.num_devices is None:
        record = dry_run(cfg, gpu)
    else:
        record = show_meshes(cfg, args.num_devices, gpu)
    print_config(cfg, args, "--print_config prints all of them")
    emit(record, args.json)


def check_devices(cfg: Config, args: argparse.Namespace) -> int:
    """Compare kernels and collectives of the run with their definitions; print a table,
    and return the exit code."""
    from train.doctor.doctor import check, table
    from train.job import prepare_model, ragged_lines

    run = prepare_model(cfg).run
    require_same("devices", device_facts())
    start_sec = time.monotonic()
    outcomes = check(run)
    sec = time.monotonic() - start_sec
    is_right = all(outcome.is_right for outcome in outcomes)
    code = DONE if is_right else FAILED
    if is_first():
        for line in ragged_lines(run):
            say_loudly(line)
        print_config(cfg, args, "--print_config prints all of them")
        print(table(outcomes, run, sec), flush=True)
        checks = [outcome.record() for outcome in outcomes]
        record = {"is_right": is_right, "sec": sec, "checks": checks}
        emit(record | {"exit_code": code}, args.json)
    return code


def find_target(cfg: Config, name: str | None) -> target.Target | None:
    """Return the GPU that a dry run is for: the one named, or else an H100. None for
    simulated devices: this machine."""
    if name is None and cfg.train.num_simulated_devices:
        return None
    return target.load(name or DEFAULT_TARGET)


def say_finished(summary: dict, cfg: Config) -> None:
    """Print that the run in the directory is finished, and what the user can do."""
    loss, num_steps = summary["eval_loss"], cfg.train.num_steps
    loss = "not finite" if loss is None else f"{loss:.4f}"
    print(
        f"{summary['run_dir']} is finished: {summary['step']} of {num_steps} steps, "
        f"held-out loss {loss}. Continue it with --gin_param='Train.num_steps = "
        f"{2 * num_steps}', start afresh with --fresh (this run is kept under another "
        "name), or name another --run_dir."
    )


if __name__ == "__main__":
    sys.exit(end(main()))
