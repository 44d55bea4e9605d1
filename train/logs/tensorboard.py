"""TensorBoard events from the records of metrics.jsonl: scalars, heat maps, the config.

Events are written here and now, not by tensorboardX's SummaryWriter: its thread ends at
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
"""From a quarter of the mean load to four times the mean; even is the white between."""
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
    "mfu": "speed/mfu",
    "dropped": "exchange/dropped",
    "adopt_msec": "balance/adopt_msec",
    "adopt_wait_msec": "balance/adopt_wait_msec",
}
MAX_TAGS = {
    "load_max_over_mean": "load/max_over_mean",
    "device_max_over_mean": "load/device_max_over_mean",
    "max_over_bound": "load/max_over_bound",
    "rounds": "exchange/rounds",
    "fullest_pair": "exchange/fullest_pair",
}
"""By layer in the record: the maximum is shown, and of the experts' load each
layer's."""
MEAN_TAGS = {
    "balance_loss": "loss/balance",
    "sequence_balance_loss": "loss/sequence_balance",
    "router_z_loss": "loss/router_z",
    "mutual_information_loss": "loss/mutual_information",
}
DECISION_TAGS = {
    "ratio_before": ("balance/ratio_before", 1.0),
    "ratio_after": ("balance/ratio_after", 1.0),
    "num_moves": ("balance/num_moves", 1.0),
    "gain_sec": ("balance/gain_msec", 1e3),
    "cost_sec": ("balance/cost_msec", 1e3),
}
"""Tag, and what its unit is times; of a decision to keep, the ratios alone."""


class TensorBoard:
    """An event file in `folder` for the steps after `step`, from which the run goes
    on (0: from the start); for process 0.

    It begins with an order to forget what older files hold of these steps, so a
    resumed run shows each step once. A full disk costs events, said loudly, and not
    the run.
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
        """Write one line of metrics.jsonl as one event; now and then a heat map.

        `tokens_le` [layer, expert] is the step's load; without it that of the record.
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
        """Return when the events are on the disk, or are said to be lost."""
        if self._file is None:
            return
        try:
            os.fsync(self._file.fileno())
        except OSError as fault:
            self._say(f"TENSORBOARD EVENTS MAY BE LOST: {fault}: {self._file.name}")
        self._file.close()
        self._file = None

    def _write(self, event) -> None:
        """Write an event whole or not at all: a reader stops for good at a torn one."""
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
        self._num_lost += 1
        if self._num_lost == 1:
            self._say(
                f"TENSORBOARD EVENTS NOT WRITTEN from step {self._step} on: {fault}; "
                "training goes on, and metrics.jsonl holds the same figures"
            )


def scalars(record: dict) -> Iterator[tuple[str, float]]:
    """Yield (tag, number) for all in a record that is a number, or one by layer."""
    for name, value in record.items():
        if name in MAX_TAGS and value:
            yield MAX_TAGS[name], float(max(value))
        elif name in MEAN_TAGS and value:
            yield MEAN_TAGS[name], float(np.mean(value))
        elif name != "step" and isinstance(value, bool | int | float):
            yield TAGS.get(name, f"other/{name}"), float(value)
    for layer, ratio in enumerate(record.get("load_max_over_mean", ())):
        yield f"load_by_layer/{layer:02d}_max_over_mean", float(ratio)
    yield from _decision_text(record.get("decision", {}))


def _decision_text(decision: dict) -> Iterator[tuple[str, float]]:
    is_kept = decision.get("kind") == "keep"
    for name, (tag, factor) in DECISION_TAGS.items():
        if name in decision and (not is_kept or name.startswith("ratio")):
            yield tag, factor * decision[name]


def heat_map(tokens_le: np.ndarray) -> np.ndarray:
    """Return load over the layer's mean as a picture: uint8 [height, width, 3].

    A row of cells is a layer, the first on top; a column is an expert. White is even,
    blue less, orange more; the colors end at a quarter and at four times the mean.
    """
    num_layers, num_experts = tokens_le.shape
    ratio_le = over_mean(tokens_le)
    rgb_lec = color(np.log2(np.maximum(ratio_le, 2**-MAX_LOG2)))
    side = int(np.clip(768 // max(num_layers, num_experts), 4, 24))
    return rgb_lec.repeat(side, axis=0).repeat(side, axis=1)


def color(log2_ratio: np.ndarray) -> np.ndarray:
    """Return uint8 [.., 3] of COLORS; beyond MAX_LOG2 the last one."""
    anchors = np.linspace(-MAX_LOG2, MAX_LOG2, len(COLORS))
    channels = [np.interp(log2_ratio, anchors, line) for line in np.transpose(COLORS)]
    return np.stack(channels, axis=-1).round().astype(np.uint8)


def frame(payload: bytes) -> bytes:
    """Return a record of an event file: length, its checksum, payload, its checksum."""
    from tensorboardX.record_writer import masked_crc32c

    length = struct.pack("<Q", len(payload))
    ends = [struct.pack("<I", masked_crc32c(part)) for part in (length, payload)]
    return length + ends[0] + payload + ends[1]


def _new_file(folder: pathlib.Path) -> io.FileIO:
    """Open a new file, whose name is the last of its folder wherever the clock stands:
    TensorBoard reads files in the order of their names, which begin with a time."""
    folder.mkdir(parents=True, exist_ok=True)
    taken = [
        int(found[1])
        for path in folder.iterdir()
        if (found := re.match(r"events\.out\.tfevents\.(\d{10})\.", path.name))
    ]
    stamp = max([int(time.time()), *(number + 1 for number in taken)])
    name = f"events.out.tfevents.{stamp:010d}.{socket.gethostname()}"
    return io.FileIO(folder / name, "ab", opener=_create)


def _create(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_EXCL, 0o644)
