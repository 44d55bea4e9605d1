"""How tools/bench/grouped_dot.py shows rows: a table of each pass, and a summary."""

from collections.abc import Iterable

Rows = list[dict]


def show_pass(rows: Rows, ours: Iterable[str]) -> None:
    """Rows of one shape and pass; `faster` is ours over the row's arm."""
    first = rows[0]
    sizes = f"{first['rows']} rows, {first['d']} -> {first['f']}"
    print(f"\n{first['shape']}, {first['pass']}: {sizes}, {first['groups']} groups")
    print(
        "| skew | arm | ms | least - most | TFLOP/s | / dense | GB/s | faster | error |"
    )
    print("|---|---|--:|--:|--:|--:|--:|--:|--:|")
    by_key = {(row["skew"], row["impl"]): row for row in rows}
    own = measured_first(rows, ours)
    for (skew, impl), row in by_key.items():
        if "declined" in row:
            print(f"| {skew} | {impl} | declined: {row['declined']} |")
            continue
        share = "" if row["share_of_dense"] is None else f"{row['share_of_dense']:.0%}"
        mine = by_key.get((skew, own), {}).get("msec")
        faster = f"{row['msec'] / mine:.2f}" if mine and impl != own else ""
        print(
            f"| {skew} | {impl} | {row['msec']:.3f} "
            f"| {row['msec_least']:.3f} - {row['msec_most']:.3f} "
            f"| {row['tflops']:.3g} | {share} | {row['gb_per_sec']:.3g} | {faster} "
            f"| {row['error']:.1e} |"
        )
    print("", end="", flush=True)


def show_summary(rows: Rows, ours: Iterable[str]) -> None:
    """Of each pass the least of our speed over that of others, and where it is."""
    own = measured_first(rows, ours)
    if own is None:
        print("\nnone of ours was measured")
        return
    print(f"\n{own}: the least of its speed over that of others, and where")
    print("| pass | / best peer | / ragged_dot | / dense | skewed / uniform |")
    print("|---|---|---|---|---|")
    for which in dict.fromkeys(row["pass"] for row in rows):
        cells = [
            least(found)
            for found in ratios([r for r in rows if r["pass"] == which], own, ours)
        ]
        print(f"| {which} | {' | '.join(cells)} |")
    print("", end="", flush=True)


def measured_first(rows: Rows, ours: Iterable[str]) -> str | None:
    """The first of ours that has a time."""
    measured = {row["impl"] for row in rows if row["msec"] is not None}
    return next((impl for impl in ours if impl in measured), None)


def ratios(rows: Rows, own: str, ours: Iterable[str]) -> tuple[dict, ...]:
    """Of one pass, by (shape, skew): our speed over the best peer's, over those of
    `ragged_dot` and `dense`, and over our own on even rows."""
    msec = {
        (row["shape"], row["skew"], row["impl"]): row["msec"]
        for row in rows
        if row["msec"] is not None
    }
    over_peer, over_ragged, over_dense, over_uniform = {}, {}, {}, {}
    for (shape, skew, impl), mine in msec.items():
        if impl != own:
            continue
        case = shape, skew
        peer_msec = [
            other
            for (*where, name), other in msec.items()
            if (*where,) == case and name not in (*ours, "dense")
        ]
        if peer_msec:
            over_peer[case] = min(peer_msec) / mine
        for name, over in (("ragged_dot", over_ragged), ("dense", over_dense)):
            if (*case, name) in msec:
                over[case] = msec[*case, name] / mine
        if skew != "uniform" and (shape, "uniform", own) in msec:
            over_uniform[case] = msec[shape, "uniform", own] / mine
    return over_peer, over_ragged, over_dense, over_uniform


def least(found: dict[tuple[str, str], float]) -> str:
    if not found:
        return "-"
    case = min(found, key=found.get)
    return f"{found[case]:.2f} ({', '.join(case)})"
