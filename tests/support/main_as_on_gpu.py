"""Run train/main.py with the transfers that a GPU refuses.

On a CPU an array is in the host's memory, and JAX's transfer guard lets every read of
it pass. On a GPU a read under transfer_guard("disallow") is an error unless
jax.device_get does it, and so is an asynchronous copy. Here they are errors too.
"""

import pathlib
import sys

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path[0] = str(ROOT)

import train.main as program  # noqa: E402
from train.launch.program import end  # noqa: E402

READS = (
    "_copy_single_device_array_to_host_async",
    "_single_device_array_to_np_array_did_copy",
)
"""Methods of JAX's arrays by which all values come to the host."""


def refuse_transfers() -> None:
    """Make the reads of arrays obey the thread's transfer guard."""
    from jax._src.array import ArrayImpl
    from jax._src.lib import guard_lib

    def guarded(read):
        def read_if_allowed(array):
            thread = guard_lib.thread_local_state()
            is_refused = thread.device_to_host == guard_lib.TransferGuardLevel.DISALLOW
            if is_refused and not thread.explicit_device_get:
                what = f"shape={array.shape}, dtype={array.dtype}"
                raise RuntimeError(f"Disallowed device-to-host transfer: {what}")
            return read(array)

        return read_if_allowed

    for name in READS:
        setattr(ArrayImpl, name, guarded(getattr(ArrayImpl, name)))


if __name__ == "__main__":
    start = program.start

    def start_as_on_gpu(cfg) -> None:
        start(cfg)  # jax reads its variables when it is imported, after this
        refuse_transfers()

    program.start = start_as_on_gpu
    sys.exit(end(program.main()))
