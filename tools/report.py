"""Make a page of one run, or of several to compare: one HTML file that needs no
network.

    python tools/report.py runs/tiny_cpu [runs/other] [--out FILE.html]
    python tools/report.py runs/tiny_cpu --serve [--port 8421]

The page has loss, speed, where the time went, the loads of experts and devices over
time, decisions of the balancer, exchanges, routers, memory and the configuration. With
--serve it follows runs that go on: it is served to this machine alone until an
interrupt (Ctrl-C). docs/report.md says more. Exit codes: 0 done, 2 bad input.
"""

import argparse
import pathlib
import sys

sys.path[0] = str(pathlib.Path(__file__).resolve().parents[1])

from tools.launch.arguments import new_parser  # noqa: E402
from tools.run_page.page import content_security_policy, render  # noqa: E402
from tools.run_page.read import RunReader, page_data  # noqa: E402
from tools.run_page.read_metrics import Limits  # noqa: E402
from tools.run_page.serve import ADDRESS, Follower, Page, Server, serve  # noqa: E402
from train.files import write_whole  # noqa: E402
from train.launch.program import BAD_INPUT, DONE, emit, refuse  # noqa: E402
from train.messages import one_line  # noqa: E402

PORT = 8421
LIVE = Limits(
    num_bins=1000,
    load_bytes=700_000,
    rows_bytes=100_000,
    layer_curve_bytes=300_000,
    plan_bytes=200_000,
    num_goodput=200,
)
"""Limits of a page that is served: its data travels again with each step."""


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    try:
        require_one_purpose(args)
        if args.serve:
            return show(args)
        return write(args)
    except (ValueError, OSError) as error:
        return refuse(error, BAD_INPUT, args.json)


def parse(argv: list[str] | None) -> argparse.Namespace:
    """Return the arguments of the command line."""
    parser = new_parser(__doc__)
    parser.add_argument(
        "run_dir", nargs="+", type=pathlib.Path, help="run directory of train/main.py"
    )
    parser.add_argument(
        "--out",
        type=pathlib.Path,
        metavar="FILE",
        help="page to write (default: report.html in the first run_dir)",
    )
    parser.add_argument(
        "--serve",
        action="store_true",
        help="serve the page on this machine, and follow the runs, until an interrupt",
    )
    parser.add_argument(
        "--port",
        type=int,
        help=f"port of --serve; 0 is any that is free (default: {PORT})",
    )
    return parser.parse_args(argv)


def require_one_purpose(args: argparse.Namespace) -> None:
    """Raise ValueError where flags contradict each other."""
    if args.serve and args.out is not None:
        raise ValueError(f"--serve writes no file: leave out --out={args.out}")
    if not args.serve and args.port is not None:
        raise ValueError(f"--port={args.port} is for --serve: give both")


def write(args: argparse.Namespace) -> int:
    """Write the page to a file, print what it shows, and return the exit code."""
    readers = read(args.run_dir, Limits())
    data = page_data(readers, is_live=False)
    page = render(data).encode()
    out = args.out or args.run_dir[0] / "report.html"
    try:
        write_whole(out, page)
    except OSError as error:
        raise ValueError(
            f"{out} cannot be written: {error.strerror}: name another file by --out"
        ) from error
    for run in data["runs"]:
        for text in (run["state_text"], *run["notes"]):
            print(one_line(f"{run['name']}: {text}"))
    print(f"{out}  {len(page) / 1e6:.1f} MB")
    runs = [
        {n: run[n] for n in ("name", "state", "step", "notes")} for run in data["runs"]
    ]
    emit({"file": str(out), "num_bytes": len(page), "runs": runs}, args.json)
    return DONE


def show(args: argparse.Namespace) -> int:
    """Serve the page until an interrupt, and return the exit code."""
    with Server(PORT if args.port is None else args.port) as server:
        page = Page(render, content_security_policy(is_live=True))
        follower = Follower(read(args.run_dir, LIVE), page)
        address = f"http://{ADDRESS}:{server.port}/"
        names = [path.resolve().name for path in args.run_dir]
        print(one_line(f"serves {' and '.join(names)} at {address}; Ctrl-C ends"))
        emit({"address": address}, args.json)
        serve(server, follower)
    return DONE


def read(folders: list[pathlib.Path], limits: Limits) -> list[RunReader]:
    """Return readers that have read the runs so far. Raises ValueError where a folder
    is no run or its log is of something else, and OSError."""
    shared = limits.shared_by(len(folders))
    readers = [RunReader(folder, shared) for folder in folders]
    for reader in readers:
        reader.read()
        reader.require_log()
    return readers


if __name__ == "__main__":
    sys.exit(main())
