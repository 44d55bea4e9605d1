"""Read the event files of TensorBoard, as TensorBoard does."""

import io
import struct

from tensorboardX.proto.event_pb2 import Event, SessionLog


def crc32c(data: bytes) -> int:
    """Return the CRC-32C of RFC 3720, appendix B.4, computed bit by bit."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = (crc >> 1) ^ (0x82F63B78 if crc & 1 else 0)
    return crc ^ 0xFFFFFFFF


def masked(data: bytes) -> int:
    """Return the masked checksum that event files use."""
    crc = crc32c(data)
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


def read_events(folder) -> list[Event]:
    """Return all events as TensorBoard reads them: files in the order of their names,
    and each up to its end or to a torn event."""
    return [event for path in sorted(folder.iterdir()) for event in read_file(path)]


def read_file(path) -> list[Event]:
    """Return the events of a file up to its end or to a torn one, and check the lengths
    and checksums of those that are whole."""
    events, data = [], io.BytesIO(path.read_bytes())
    while len(head := data.read(12)) == 12:
        length, crc = struct.unpack("<QI", head)
        payload, end = data.read(length), data.read(4)
        if len(end) < 4:
            break
        assert crc == masked(head[:8])
        assert end == struct.pack("<I", masked(payload))
        events.append(Event.FromString(payload))
    return events


def shown_steps(folder) -> dict[str, list[int]]:
    """Return the steps that TensorBoard shows for each tag, without those that a later
    session replaces."""
    steps = {}
    for event in read_events(folder):
        if event.session_log.status == SessionLog.START:
            for kept in steps.values():
                kept[:] = [step for step in kept if step < event.step]
        for value in event.summary.value:
            steps.setdefault(value.tag, []).append(event.step)
    return steps
