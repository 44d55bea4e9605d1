"""Test what the screen of a run shows, in terminals of any size."""

import dataclasses

import pytest

from train.logs.region import cells, clock, cut, flow
from train.logs.screen import Outlook, Shown, Sight, screen_lines
from train.logs.signs import ASCII, UNICODE, Curve, bar, signs_for, spark

DECISION = {
    "step": 20, "kind": "swap", "adopt_step": 24, "why": "saves 7.8 ms/step",
    "device_max_over_mean_before": 1.33, "device_max_over_mean_after": 1.08,
    "changes": {},
}  # fmt: skip
RELAYOUT = DECISION | {
    "step": 90, "kind": "relayout", "adopt_step": 190,
    "changes": {"slots_per_device": (2, 3)},
}  # fmt: skip
OUTLOOK = Outlook(
    (
        Shown(DECISION, "adopted at step 24"),
        Shown(RELAYOUT, "adoption at step 190"),
    ),
    compiled_for_step=190,
    compiled_for_sec=12.0,
)


def make_record(num_layers: int = 3, **fields) -> dict:
    ratios = [1.0 + 0.01 * (7 * layer % num_layers) for layer in range(num_layers)]
    return {
        "step": 137,
        "loss": 2.911,
        "tok_per_sec": 5317.0,
        "step_msec": 192.6,
        "device_max_over_mean": ratios,
        "expert_max_over_mean": [2.5] * num_layers,
        "home_device_max_over_mean": [1.58] * num_layers,
        **fields,
    }


def make_sight(num_layers: int = 3, **fields) -> Sight:
    sight = Sight(
        num_steps=480,
        step=137,
        record=make_record(num_layers),
        losses=[5.5 - 0.02 * i for i in range(137)],
        step_sec=0.1926,
        tok_per_sec=5317.0,
        mfu=0.412,
        evaluation=(100, 2.9532),
        elapsed_sec=48.0,
        eta_sec=92.0,
        outlook=OUTLOOK,
    )
    return dataclasses.replace(sight, **fields)


def drawn(sight: Sight, width: int = 99, height: int = 30, signs=UNICODE) -> list[str]:
    lines = screen_lines(sight, width, height, signs)
    return ["".join(text for text, _ in line) for line in lines]


@pytest.mark.parametrize("signs", [UNICODE, ASCII], ids=["unicode", "ascii"])
def test_every_size_of_a_terminal_is_kept_to(signs):
    sights = [make_sight(num_layers=n) for n in (1, 3, 64)]
    sights += [Sight(480), make_sight(outlook=Outlook()), make_sight(losses=[2.0])]
    for sight in sights:
        for width in (39, 40, 59, 60, 79, 99, 199):
            for height in (10, 11, 19, 20, 24, 60):
                lines = screen_lines(sight, width, height, signs)
                assert max(map(cells, lines)) <= width
                assert 1 <= len(lines) <= height - 2, (
                    "some rows are of what was printed"
                )
                assert f"step {sight.step}/480" in "".join(x for x, _ in lines[0])


def test_a_wide_terminal_shows_everything():
    lines = drawn(make_sight())
    text = "\n".join(lines)
    for part in (
        *("step 137/480", "28%", "ETA 1:32", "elapsed 0:48", "loss 2.911", "▇▇▆", "▁"),
        *("held-out 2.9532 at step 100", "5,317 tok/s", "192.6 ms/step", "MFU 41.2%"),
        *("now  training", "for 0:12", "compiling the layout of step 190"),
        "step 20  swap 1.33->1.08  adopted at step 24  saves 7.8 ms/step",
        "step 90  relayout 1.33->1.08  adoption at step 190  slots_per_device 2->3",
        *("home 1.58", "expert max/mean 2.50"),
    ):
        assert part in text, part
    assert "GiB" not in text, "nothing is known of memory"
    ratios = [line.split()[4] for line in lines if line.startswith("layer")]
    assert ratios == ["1.02", "1.01", "1.00"], "the worst layer is the first"


def test_the_smallest_terminal_shows_the_worst_layer_and_the_last_decision():
    text = "\n".join(drawn(make_sight(64), 39, 10))
    assert "max/mean 1.63" in text
    assert "step 90  relayout 1.33->1.08" in text


def test_layers_that_find_no_room_are_counted():
    lines = [x for x in drawn(make_sight(64, outlook=Outlook())) if "layer" in x]
    assert lines[-1] == f"and {64 - (len(lines) - 1)} more even layers"


def test_of_several_decisions_to_keep_the_newest_is_shown():
    keeps = [
        Shown(DECISION | {"step": step, "kind": "keep", "why": f"at {step}"}, "")
        for step in (30, 40, 50)
    ]
    outlook = Outlook((*keeps[:2], OUTLOOK.decisions[1], *keeps))
    text = "\n".join(drawn(make_sight(outlook=outlook)))
    assert [f"keep 1.33  at {step}" in text for step in (30, 40, 50)] == [0, 1, 1]


def test_memory_is_shown_where_it_is_known():
    record = make_record(host_memory_gib=2.31, device_memory_gib=None)
    assert "host 2.3 GiB" in "\n".join(drawn(make_sight(record=record)))
    record |= {"device_memory_gib": 10.0, "peak_device_memory_gib": 12.04}
    text = "\n".join(drawn(make_sight(record=record)))
    assert "host 2.3 GiB  device 10.0 GiB, peak 12.0" in text


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({}, "training"),
        ({"idle_sec": 4.0}, "training"),
        ({"idle_sec": 12.0}, "training; step 138 has run for 0:12"),
        ({"doing": "evaluating", "doing_sec": 3.0}, "evaluating, for 0:03"),
        ({"record": None}, "waiting for the first step, for 0:00"),
    ],
)
def test_the_screen_says_what_the_run_does(fields, text):
    assert f"now  {text}" in drawn(make_sight(**fields))


def test_a_loss_that_is_not_finite_leaves_a_blank_in_the_curve():
    nan = float("nan")
    assert spark([3.0, nan, 1.0, None], 4, UNICODE) == "█ ▁ "
    assert spark([1.0, 3.0, 2.0, 2.0], 2, UNICODE) == "▁▁", "both have the mean 2"
    assert spark([1.0, nan, 3.0, 3.0], 2, ASCII) == "_#"
    assert spark([], 9, ASCII) == ""
    sight = make_sight(losses=[nan] * 9, record=make_record(loss=nan))
    assert "loss nan" in "\n".join(drawn(sight))


def test_a_bar_grows_by_parts_of_a_cell():
    lengths = [len(bar(i / 32, 4, UNICODE)) for i in range(33)]
    assert lengths == sorted(lengths)
    assert (lengths[0], lengths[1], lengths[-1]) == (0, 1, 4)
    assert bar(9.0, 4, ASCII) == "####"
    assert bar(-1.0, 4, ASCII) == ""


def test_a_curve_of_any_length_keeps_its_means():
    curve = Curve(max_points=8)
    for i in range(1000):
        curve.append(float(i))
        assert len(curve.points()) <= 8
    points = curve.points()
    assert points == sorted(points)
    assert points[0] == sum(range(128)) / 128


@pytest.mark.parametrize(
    ("encoding", "environ", "is_unicode"),
    [
        ("utf-8", {"LANG": "en_US.UTF-8"}, True),
        ("utf-8", {"LC_ALL": "C", "LANG": "en_US.UTF-8"}, False),
        ("utf-8", {"LC_ALL": "POSIX", "PYTHONUTF8": "1"}, True),
        ("utf-8", {}, False),
        ("iso-8859-1", {"LANG": "en_US.UTF-8"}, False),
        (None, {"LANG": "en_US.UTF-8"}, False),
    ],
)
def test_signs_are_ascii_unless_stream_and_locale_are_utf8(
    encoding, environ, is_unicode
):
    class Stream:
        pass

    Stream.encoding = encoding
    assert (signs_for(Stream(), environ) is UNICODE) == is_unicode


def test_texts_are_cut_by_cells_and_not_by_characters():
    assert cut("abcdef", 6) == "abcdef"
    assert cut("abcdef", 5) == "abc.."
    assert cut("日本語の文", 7) == "日本.."
    lines = flow([("aaaa", ""), ("bbbb", ""), ("cccccc", "")], 10, 2, indent=2)
    assert ["".join(x for x, _ in line) for line in lines] == ["aaaa  bbbb", "  cccccc"]
    assert (clock(48.9), clock(3723)) == ("0:48", "1:02:03")
