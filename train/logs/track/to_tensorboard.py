"""TensorBoard: event files with scalars, heat maps and the configuration.

The files are written by tensorboardX's RecordWriter. Its SummaryWriter would hand each
event to a thread that ends at the first failed write, and then wait for it for ever.
"""

import os
import pathlib
import re
import socket
import time
from typing import Any

from tensorboardX.proto.event_pb2 import Event, SessionLog
from tensorboardX.proto.summary_pb2 import Summary
from tensorboardX.record_writer import RecordWriter
from tensorboardX.summary import image, text

from train.logs import heat_map
from train.logs.scalars import scalars


class TensorBoard:
    """Event files in `folder` for the steps after `step`, the last that is done.

    The first begins with an order to forget what older files hold of these steps, so
    that a resumed run shows each step once. A reader stops for good at a torn event:
    after a failed write the events go on in another file.
    """

    def __init__(self, folder: str | os.PathLike, config_text: str, step: int) -> None:
        self._folder = pathlib.Path(folder)
        code = "\n".join("    " + line for line in config_text.splitlines())
        forget = SessionLog(status=SessionLog.START)
        self._head = [
            Event(step=step + 1, session_log=forget),
            Event(step=step + 1, summary=text("config", code)),
        ]
        """Events that are not in a file yet, and must be before all others."""
        self._writer: RecordWriter | None = None

    def append(self, record: dict[str, Any]) -> None:
        """Write a record as one event, and its load as a heat map if it has one."""
        values = [
            Summary.Value(tag=tag, simple_value=number)
            for tag, number in scalars(record)
        ]
        self._write(Event(step=record["step"], summary=Summary(value=values)))
        if (tokens_le := record.get("tokens_le")) is not None:
            map_hwc = heat_map.heat_map(tokens_le)
            summary = image("load/over_mean", map_hwc, dataformats="HWC")
            self._write(Event(step=record["step"], summary=summary))

    def flush(self) -> None:
        """Bring the events to the disk."""
        if self._writer is None:
            return
        try:
            self._writer.flush()
        except OSError:
            self._give_up()
            raise
        self._head = []

    def close(self) -> None:
        """Bring the events to the disk, and close the file."""
        self.flush()
        if self._writer is not None:
            self._writer.close()

    def _write(self, event: Event) -> None:
        """Write an event, in a new file if there is none."""
        try:
            if self._writer is None:
                self._writer = RecordWriter(str(_new_path(self._folder)))
                for first in (Event(file_version="brain.Event:2"), *self._head):
                    self._put(first)
            self._put(event)
        except OSError:
            self._give_up()
            raise

    def _put(self, event: Event) -> None:
        event.wall_time = time.time()
        self._writer.write(event.SerializeToString())

    def _give_up(self) -> None:
        """Leave a file behind whose last event may be torn."""
        writer, self._writer = self._writer, None
        try:
            if writer is not None:
                writer.close()
        except OSError:
            pass  # the failed write, once more


def _new_path(folder: pathlib.Path) -> pathlib.Path:
    """Return the path of a new file whose name sorts last in its folder, even if the
    clock was set back.

    TensorBoard reads files in the order of their names, which begin with a time.
    """
    folder.mkdir(parents=True, exist_ok=True)
    taken = [
        int(match[1])
        for path in folder.iterdir()
        if (match := re.match(r"events\.out\.tfevents\.(\d{10})\.", path.name))
    ]
    stamp = max([int(time.time()), *(number + 1 for number in taken)])
    return folder / f"events.out.tfevents.{stamp:010d}.{socket.gethostname()}"
