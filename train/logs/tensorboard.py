"""TensorBoard events from the records of metrics.jsonl: scalars, heat maps, the config.

Events are written at once, and not by tensorboardX's SummaryWriter: its thread ends at
the first failed write, and then the queue in front of it blocks the run for ever.
"""

import io
import os
import pathlib
import re
import socket
import struct
import time
from collections.abc import Callable, Iterator

import numpy as np

from moejax.perf.traffic import over_mean
from train.launch.program import say_loudly

HEAT_EVERY_STEPS = 50
COLORS = (
    (20, 60, 140),
    (105, 160, 205),
    (246, 245, 241),
    (232, 150, 85),
    (150, 45, 5),
)
"""Red, green and blue from a quarter of the mean load to four times the mean. The white
in the middle is the mean."""
MAX_LOG2 = 2.0

TAGS = {
    "loss": "loss/train",
    "eval_loss": "loss/held_out",
    "total_loss": "loss/total",
    "lr": "optimizer/lr",
    "grad_norm": "optimizer/grad_norm",
    "skipped": "optimizer/skipped",
    "skipped_in_a_row": "optimizer/skipped_in_a_row",
    "tok_per_sec": "speed/tok_per_sec",
    "step_msec": "speed/step_msec",
    "modelled_step_msec": "speed/modelled_step_msec",
    "mfu": "speed/mfu",
    "dropped": "exchange/dropped",
    "dropped_share": "exchange/dropped_share",
    "adopt_msec": "balance/adopt_msec",
    "adopt_wait_msec": "balance/adopt_wait_msec",
    "modelled_saving_msec": "balance/modelled_saving_msec",
}
MAX_TAGS = {
    "expert_max_over_mean": "load/expert_max_over_mean",
    "device_max_over_mean": "load/device_max_over_mean",
    "home_device_max_over_mean": "load/home_device_max_over_mean",
    "device_max_over_bound": "load/device_max_over_bound",
    "rounds": "exchange/rounds",
    "fullest_pair": "exchange/fullest_pair",
}
"""Tags of fields that have a value for each layer; the largest value is shown.

`expert_max_over_mean` is shown for each layer too."""
MEAN_TAGS = {
    "balance_loss": "loss/balance",
    "sequence_balance_loss": "loss/sequence_balance",
    "router_z_loss": "loss/router_z",
    "mutual_information_loss": "loss/mutual_information",
    "home_std_over_std": "load/home_std_over_std",
}
DECISION_TAGS = {
    "device_max_over_mean_before": ("balance/device_max_over_mean_before", 1.0),
    "device_max_over_mean_after": ("balance/device_max_over_mean_after", 1.0),
    "num_moves": ("balance/num_moves", 1.0),
    "modelled_gain_sec": ("balance/modelled_gain_msec", 1e3),
    "modelled_cost_sec": ("balance/modelled_cost_msec", 1e3),
}
"""Tag of each field of a decision, and the factor from its unit to the tag's.

A decision to keep shows the ratios alone."""


class TensorBoard:
    """An event file in `folder` for the steps after `step`, the last that is done.

    Process 0 writes it. The file begins with an order to forget what older files hold
    of these steps, so that a resumed run shows each step once. A full disk costs
    events, with a message on standard error, but does not end the run.
    """

    def __init__(
        self,
        folder: str | os.PathLike,
        config_text: str,
        step: int,
        *,
        heat_every_steps: int = HEAT_EVERY_STEPS,
        say: Callable[[str], None] = say_loudly,
    ) -> None:
        from tensorboardX.proto.event_pb2 import Event, SessionLog
        from tensorboardX.summary import text

        self._event, self._say, self._num_lost = Event, say, 0
        self._step = step + 1
        self._heat_every_steps = heat_every_steps
        self._folder = folder
        self._file: io.FileIO | None = None
        try:
            self._file = _new_file(pathlib.Path(folder))
        except OSError as fault:
            self._lose(fault)
        forget = SessionLog(status=SessionLog.START)
        self._write(Event(file_version="brain.Event:2"))
        self._write(Event(step=step + 1, session_log=forget))
        code = "\n".join("    " + line for line in config_text.splitlines())
        self._write(Event(step=step + 1, summary=text("config", code)))

    def append(self, record: dict, tokens_le=None) -> None:
        """Write one record of metrics.jsonl as one event, and a heat map every
        HEAT_EVERY_STEPS steps.

        `tokens_le` [layer, expert] is the step's load; without it, the record's own
        load is drawn, if it has one.
        """
        from tensorboardX.proto.summary_pb2 import Summary
        from tensorboardX.summary import image

        step = self._step = record["step"]
        values = [
            Summary.Value(tag=tag, simple_value=number)
            for tag, number in scalars(record)
        ]
        self._write(self._event(step=step, summary=Summary(value=values)))
        tokens_le = record.get("tokens_le") if tokens_le is None else tokens_le
        if tokens_le is not None and step % self._heat_every_steps == 0:
            map_hwc = heat_map(np.asarray(tokens_le))
            summary = image("load/over_mean", map_hwc, dataformats="HWC")
            self._write(self._event(step=step, summary=summary))

    def close(self) -> None:
        """Return when the events are on the disk, or a message says that they may be
        lost."""
        if self._file is None:
            return
        try:
            os.fsync(self._file.fileno())
        except OSError as fault:
            self._say(f"TENSORBOARD EVENTS MAY BE LOST: {fault}: {self._file.name}")
        self._file.close()
        self._file = None

    def _write(self, event) -> None:
        """Write an event whole or not at all, for a reader stops for good at a torn
        event."""
        if self._file is None:
            return
        event.wall_time = time.time()
        framed = frame(event.SerializeToString())
        end = os.fstat(self._file.fileno()).st_size
        try:
            if self._file.write(framed) != len(framed):
                raise OSError("no space left for a whole event")
        except OSError as fault:
            if os.fstat(self._file.fileno()).st_size != end:
                self._file.truncate(end)
            self._lose(fault)
        else:
            if self._num_lost:
                self._say(f"events are written again, without {self._num_lost}")
            self._num_lost = 0

    def _lose(self, fault: OSError) -> None:
        """Count an event that could not be written, and warn the user of the first."""
        self._num_lost += 1
        if self._num_lost == 1:
            self._say(
                f"TENSORBOARD EVENTS NOT WRITTEN from step {self._step} on: {fault}: "
                f"{self._folder}; "
                "training goes on, and metrics.jsonl holds the same figures"
            )


def scalars(record: dict) -> Iterator[tuple[str, float]]:
    """Yield (tag, number) for the fields of a record that are a number or a list of one
    number per layer."""
    for name, value in record.items():
        if name in MAX_TAGS and value:
            yield MAX_TAGS[name], float(max(value))
        elif name in MEAN_TAGS and value:
            yield MEAN_TAGS[name], float(np.mean(value))
        elif name != "step" and isinstance(value, bool | int | float):
            yield TAGS.get(name, f"other/{name}"), float(value)
    for layer, ratio in enumerate(record.get("expert_max_over_mean", ())):
        yield f"load_by_layer/{layer:02d}_expert_max_over_mean", float(ratio)
    yield from _decision_scalars(record.get("decision", {}))


def _decision_scalars(decision: dict) -> Iterator[tuple[str, float]]:
    """Yield (tag, number) for the figures of a decision."""
    is_kept = decision.get("kind") == "keep"
    for name, (tag, factor) in DECISION_TAGS.items():
        if name in decision and (not is_kept or name.startswith("device_")):
            yield tag, factor * decision[name]


def heat_map(tokens_le: np.ndarray) -> np.ndarray:
    """Draw the load of each expert, relative to its layer's mean, as a picture: uint8
    [height, width, 3].

    A row of cells is a layer, the first on top; a column is an expert. White is the
    mean, blue is less and orange is more. The colors end at a quarter of the mean and
    at four times the mean.
    """
    num_layers, num_experts = tokens_le.shape
    ratio_le = over_mean(tokens_le)
    rgb_lec = color(np.log2(np.maximum(ratio_le, 2**-MAX_LOG2)))
    side = int(np.clip(768 // max(num_layers, num_experts), 4, 24))
    return rgb_lec.repeat(side, axis=0).repeat(side, axis=1)


def color(log2_ratio: np.ndarray) -> np.ndarray:
    """Return uint8 [.., 3]: COLORS interpolated, and the last one beyond MAX_LOG2."""
    anchors = np.linspace(-MAX_LOG2, MAX_LOG2, len(COLORS))
    channels = [np.interp(log2_ratio, anchors, line) for line in np.transpose(COLORS)]
    return np.stack(channels, axis=-1).round().astype(np.uint8)


def frame(payload: bytes) -> bytes:
    """Return the bytes of one record in a TensorBoard event file: the length with its
    checksum, then the payload with its checksum."""
    from tensorboardX.record_writer import masked_crc32c

    length = struct.pack("<Q", len(payload))
    ends = [struct.pack("<I", masked_crc32c(part)) for part in (length, payload)]
    return length + ends[0] + payload + ends[1]


def _new_file(folder: pathlib.Path) -> io.FileIO:
    """Open a new file whose name sorts last in its folder, even if the clock was set
    back.

    TensorBoard reads files in the order of their names, which begin with a time.
    """
    folder.mkdir(parents=True, exist_ok=True)
    taken = [
        int(match[1])
        for path in folder.iterdir()
        if (match := re.match(r"events\.out\.tfevents\.(\d{10})\.", path.name))
    ]
    stamp = max([int(time.time()), *(number + 1 for number in taken)])
    name = f"events.out.tfevents.{stamp:010d}.{socket.gethostname()}"
    return io.FileIO(folder / name, "ab", opener=_create)


def _create(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_EXCL, 0o644)
