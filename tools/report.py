"""Make a page of a run: one HTML file that needs no network.

    python tools/report.py runs/tiny_cpu [--out FILE.html]

The page shows which device holds which experts, before and after each decision of the
balancer, what the decision was to save and what it saved; beside it loss, speed, where
the time went, loads, exchanges, routers, memory and the configuration. docs/report.md
says more. Exit codes: 0 done, 2 bad input.
"""

import pathlib
import sys

sys.path[0] = str(pathlib.Path(__file__).resolve().parents[1])

from tools.launch.arguments import new_parser  # noqa: E402
from tools.run_page.page import render  # noqa: E402
from tools.run_page.read import read_run  # noqa: E402
from train.files import write_whole  # noqa: E402
from train.launch.program import BAD_INPUT, DONE, emit, refuse  # noqa: E402
from train.messages import one_line  # noqa: E402


def main(argv: list[str] | None = None) -> int:
    parser = new_parser(__doc__)
    parser.add_argument(
        "run_dir", type=pathlib.Path, help="run directory of train/main.py"
    )
    parser.add_argument(
        "--out",
        type=pathlib.Path,
        metavar="FILE",
        help="page to write (default: report.html in run_dir)",
    )
    args = parser.parse_args(argv)
    try:
        record = write(args.run_dir, args.out or args.run_dir / "report.html")
    except (ValueError, OSError) as error:
        return refuse(error, BAD_INPUT, args.json)
    emit(record, args.json)
    return DONE


def write(folder: pathlib.Path, out: pathlib.Path) -> dict:
    """Write the page of the run in `folder`, print what it shows, and return the record
    of --json. Raises ValueError where the folder is no run or `out` cannot be written,
    and OSError."""
    run = read_run(folder)
    page = render(run).encode()
    try:
        write_whole(out, page)
    except OSError as error:
        raise ValueError(
            f"{out} cannot be written: {error.strerror}: name another file by --out"
        ) from error
    for text in (run["state_text"], *run["notes"]):
        print(one_line(f"{run['name']}: {text}"))
    print(f"{out}  {len(page) / 1e6:.1f} MB")
    shown = {name: run[name] for name in ("name", "state", "step", "notes")}
    return {"file": str(out), "num_bytes": len(page), "run": shown}


if __name__ == "__main__":
    sys.exit(main())
