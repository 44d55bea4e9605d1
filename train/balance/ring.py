"""Counts of steps on their way from the loop to the planner's process: a ring of slots
in memory that both share.

    loop      write slot n % num_slots   ->  a message with n, through a pipe
    planner   copy slot n % num_slots    ->  counter = n + 1: the slot is free again
"""

import mmap
import os
import tempfile

import numpy as np

NUM_SLOTS = 8
"""Slots of a ring. The planner copies a slot as soon as it hears of it, so that few are
in use at once, however long it plans."""
HEAD_BYTES = 64
"""Bytes before the first slot, which hold the counter."""


class Ring:
    """A ring of slots for int32 arrays of one shape, in shared memory."""

    def __init__(self, shape: tuple[int, ...], descriptor: int | None = None) -> None:
        """Make the memory, or map that of a descriptor from another process."""
        slot_shape = NUM_SLOTS, *shape
        num_bytes = HEAD_BYTES + 4 * int(np.prod(slot_shape))
        is_new = descriptor is None
        self.descriptor = _make_memory(num_bytes) if is_new else descriptor
        self._memory = mmap.mmap(self.descriptor, num_bytes)
        self._num_read_1 = np.frombuffer(self._memory, np.int64, 1)
        self._slots = np.frombuffer(self._memory, np.int32, offset=HEAD_BYTES)
        self._slots = self._slots.reshape(slot_shape)
        if is_new:
            self._slots[:] = 0  # so that the first steps do not wait for pages

    def is_full(self, number: int) -> bool:
        """Return whether the slot of array `number`, from 0, still holds another."""
        return number - int(self._num_read_1[0]) >= NUM_SLOTS

    def write(self, number: int, array: np.ndarray) -> None:
        """Copy an array into its slot, which must be free."""
        np.copyto(self._slots[number % NUM_SLOTS], array)

    def read(self, number: int) -> np.ndarray:
        """Return a copy of the array of that number, and free its slot."""
        array = self._slots[number % NUM_SLOTS].copy()
        self._num_read_1[0] = number + 1
        return array


def _make_memory(num_bytes: int) -> int:
    """Return the descriptor of memory without a name; where the system has none, of a
    file without a name."""
    if hasattr(os, "memfd_create"):
        descriptor = os.memfd_create("moejax-planner")
    else:
        with tempfile.TemporaryFile() as file:
            descriptor = os.dup(file.fileno())
    os.ftruncate(descriptor, num_bytes)
    return descriptor
