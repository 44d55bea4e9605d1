"""The figure of MicroMoE that sweeps the skew of Zipf's law, as a picture and a table.

    python tools/plots/zipf.py [--out zipf.png] [--draws 20] [--json]

8 devices, 32 experts, 64 slots; expert i has rows ~ i^-s, in random order. Shown is the
fullest device over the mean, mean over draws:

    vanilla     two groups of 4 devices, each with all experts; the best split
    random      two replicas of each expert at random; the best split
    symmetric   the complete graph of 8 devices and a matching; the best split
    asymmetric  as many replicas as the true loads ask for; the best split
    dynamic     copies for this micro-batch alone (moejax.plan.dynamic_replication), own
    slots besides
    eplb        plans of EPLB from the true loads, replicas share evenly
    floor       max(1, 4 * the hottest expert's share): below it no plan with two
                replicas of each expert can come

Source: MicroMoE (FineMoE), arXiv 2511.16947, Fig. 8. What it says of three of them is
printed beside what is found. Exit codes: 0 done, 2 bad input.
"""

import argparse
import pathlib
import sys

import numpy as np

sys.path[0] = str(pathlib.Path(__file__).resolve().parents[2])

from moejax.balance.policies import eplb  # noqa: E402
from moejax.balance.policies.micromoe import policy as micromoe  # noqa: E402
from moejax.balance.policies.micromoe import symmetric  # noqa: E402
from moejax.balance.policies.micromoe.density import density  # noqa: E402
from moejax.perf import traffic  # noqa: E402
from moejax.plan.dynamic_replication import pair  # noqa: E402
from moejax.plan.layout import Layout  # noqa: E402
from train.launch.ending import DONE, emit, guarded  # noqa: E402

W, E, REPLICAS = 8, 32, 2
SLOTS = E * REPLICAS // W
ROWS = 2**17
"""8 devices with 4 sequences of 2048 tokens, top-2."""
SKEWS = tuple(round(0.1 * tenth, 1) for tenth in range(4, 21))
PERFECT = 1.005
"""Counts as perfect: half a percent above the mean cannot be seen in the figure."""
NEAR = 1.06
"""Where the lower part of the picture ends."""
STYLES = {
    "vanilla": ("#d55e00", "-", "vanilla EDP groups, best split"),
    "eplb": ("#cc79a7", "-", "EPLB from true loads, even split"),
    "random": ("#56b4e9", "-", "random plan, best split"),
    "symmetric": ("#0072b2", "-", "symmetric (K8 + matching), best split"),
    "floor": ("0.3", ":", "floor of two replicas each"),
    "asymmetric": ("#009e73", "-", "asymmetric from true loads, best split"),
    "dynamic": ("#e69f00", "--", "dynamic (pairing)"),
}
"""Okabe and Ito's colours, line, name; from the least even down."""


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    return guarded(lambda: work(args), as_json=args.json)


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--out", type=pathlib.Path, default=pathlib.Path("zipf.png"), help="zipf.png")
    add("--draws", type=int, default=20, help="loads of each skew: 20")
    add("--seed", type=int, default=0)
    add("--json", action="store_true", help="end with one JSON object on the last line")
    return parser.parse_args(argv)


def work(args: argparse.Namespace) -> int:
    if args.draws < 1:
        raise ValueError(f"--draws {args.draws} must be at least 1")
    curves = sweep(args.draws, args.seed)
    statements = published(curves)
    show(curves, statements, args)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    figure = draw(curves, args.draws)
    figure.savefig(args.out, dpi=110, pil_kwargs={"optimize": True})
    print(f"{args.out}  {args.out.stat().st_size / 1e3:.0f} kB")
    record = {
        "devices": W,
        "experts": E,
        "slots": W * SLOTS,
        "draws": args.draws,
        "seed": args.seed,
        "skews": SKEWS,
        "max_over_mean": {name: curve.tolist() for name, curve in curves.items()},
        "published": statements,
        "out": str(args.out),
    }
    emit(record, args.json)
    return DONE


def sweep(draws: int, seed: int) -> dict[str, np.ndarray]:
    """{curve: max over mean by skew, mean over draws}. A draw has one order of experts
    and one random plan for all skews, so that curves are smooth."""
    sums = {name: np.zeros(len(SKEWS)) for name in STYLES}
    for number in range(draws):
        rng = np.random.default_rng((seed, number))
        rank_e, random_p = rng.permutation(np.arange(1.0, E + 1)), at_random(rng)
        for index, skew in enumerate(SKEWS):
            share_e = rank_e**-skew
            load_e = rng.multinomial(ROWS, share_e / share_e.sum())
            for name, ratio in ratios(load_e, random_p).items():
                sums[name][index] += ratio / draws
    return sums


def ratios(load_e: np.ndarray, random_p: np.ndarray) -> dict[str, float]:
    """The fullest device over the mean, of one load."""
    mean = ROWS / W
    plans = {
        "vanilla": vanilla(),
        "random": random_p,
        "symmetric": symmetric.complete_with_matching(W),
        "asymmetric": micromoe.asymmetric(load_e, W, SLOTS),
    }
    best = {name: density(row_p, load_e, W) for name, row_p in plans.items()}
    return {name: rows / mean for name, rows in best.items()} | {
        "dynamic": dynamic(load_e),
        "eplb": even(eplb.rebalance(load_e, W, SLOTS), load_e),
        "floor": max(1.0, load_e.max() / REPLICAS / mean),
    }


def vanilla() -> np.ndarray:
    """Groups of w / 2 devices, alike: an expert's two devices have the same experts."""
    group_p = np.arange(E, dtype=np.int32)
    return np.tile(group_p, REPLICAS)


def at_random(rng) -> np.ndarray:
    """Each local index holds as many experts on as many devices: two random orders of
    all, drawn until no device has an expert twice."""
    while True:
        orders = [rng.permutation(E).reshape(W, -1) for _ in range(REPLICAS)]
        sorted_ws = np.sort(np.concatenate(orders, axis=1), axis=1)
        if (np.diff(sorted_ws, axis=1) > 0).all():
            return sorted_ws.astype(np.int32).reshape(-1)


def dynamic(load_e: np.ndarray) -> float:
    own = E // W
    layout = Layout(
        E, W, 2 * own, 1, store="transient",
        offers_per_device=own, copies_per_device=own,
    )  # fmt: skip
    rows_p = pair(load_e, np.arange(E), layout).rows_p
    return traffic.max_over_mean(rows_p.reshape(W, -1).sum(axis=1))


def even(row_p: np.ndarray, load_e: np.ndarray) -> float:
    """Replicas of an expert share its rows evenly, whatever their source."""
    load_we = np.tile(load_e / W, (W, 1))
    rows_wp = traffic.rows_by_slot(load_we, row_p, W)
    return traffic.max_over_mean(traffic.device_rows(rows_wp))


def published(curves: dict[str, np.ndarray]) -> list[dict]:
    """What the paper says of its figure, and what is found here."""
    skew_s = np.array(SKEWS)
    symmetric_s, is_below_1_s = curves["symmetric"], skew_s < 1
    more_s = curves["random"] - symmetric_s
    perfect_s = skew_s[symmetric_s <= PERFECT]
    return [
        {
            "curve": "symmetric",
            "published": "perfect for s < 1, then worse",
            "here": f"at most {PERFECT:g} up to s = {perfect_s.max(initial=0):g}, "
            f"{symmetric_s[is_below_1_s].max():.3f} at most for s < 1, "
            f"{symmetric_s[-1]:.3f} at s = 2",
        },
        {
            "curve": "random",
            "published": "slightly worse than symmetric",
            "here": f"{more_s.mean():.3f} more on average, {more_s.min():.3f} to "
            f"{more_s.max():.3f}",
        },
        {
            "curve": "asymmetric",
            "published": "always perfect",
            "here": f"{curves['asymmetric'].max():.4f} at most",
        },
    ]


def show(curves: dict, statements: list[dict], args: argparse.Namespace) -> None:
    print(
        f"max / mean of {W} devices, {E} experts, {W * SLOTS} slots; mean of "
        f"{args.draws} draws, seed {args.seed}"
    )
    print("| s | " + " | ".join(STYLES) + " |")
    print("|--:|" + "--:|" * len(STYLES))
    for index, skew in enumerate(SKEWS):
        cells = [f"{curves[name][index]:.3f}" for name in STYLES]
        print(f"| {skew:.1f} | " + " | ".join(cells) + " |")
    print("\n| curve | published (Fig. 8) | here |\n|---|---|---|")
    for row in statements:
        print("| " + " | ".join(row.values()) + " |")


def draw(curves: dict[str, np.ndarray], draws: int):
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.6, 6.2), layout="constrained")
    axs = figure.subplots(2, 1, sharex=True, height_ratios=(2.4, 1))
    for ax in axs:
        for name, (colour, line, label) in STYLES.items():
            width = 3.4 if name == "asymmetric" else 1.6
            ax.plot(SKEWS, curves[name], line, color=colour, lw=width, label=label)
        ax.spines[["top", "right"]].set_visible(False)
    axs[0].set_ylabel("fullest device / mean")
    axs[0].set_title(
        f"{W} devices, {E} experts, {W * SLOTS} slots: mean of {draws} draws"
    )
    axs[0].legend(frameon=False, fontsize=9)
    axs[1].set_ylabel("the same, near 1")
    axs[1].set_ylim(0.996, NEAR)
    axs[1].set_xlabel("skew s of Zipf's law: expert i has rows ~ $i^{-s}$")
    axs[1].set_xlim(SKEWS[0], SKEWS[-1])
    return figure


if __name__ == "__main__":
    sys.exit(main())
