"""Stated rates from which seconds are estimated."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Rates:
    """Rates of one device, printed with each result that uses them.

    They are what large products and transfers reach, not the peaks of a data sheet.
    They serve to compare compiled programs, not to predict a step's time.
    """

    dense_flops_per_sec: float
    """Dense products and attention."""
    grouped_flops_per_sec: float
    """Products of experts, by the grouped kernels."""
    hbm_bytes_per_sec: float
    nvlink_bytes_per_sec: float
    """Bytes sent to GPUs of the same node, in one direction."""
    infiniband_bytes_per_sec: float
    """Bytes sent to other nodes through one device's network card, in one direction."""
    filled_rows: float = 1.0
    """Share of the rows of an exchange buffer that hold tokens. Grouped products skip
    the others, and a ragged exchange does not send them. A padded buffer of 1.5 times
    the mean has 2 / 3."""
    unknown_trip_count: int = 0
    """Assumed trip count of a loop where the compiler does not know it. Such are the
    later rounds of an exchange, which run only when rows exceed a buffer, and the pairs
    of blocks that attention without a kernel visits."""

    def __post_init__(self):
        speeds = [f.name for f in dataclasses.fields(self) if "per_sec" in f.name]
        for name in (*speeds, "filled_rows"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} = {getattr(self, name)} must be above 0")
        if self.filled_rows > 1:
            raise ValueError(f"filled_rows = {self.filled_rows} must be at most 1")
        if self.unknown_trip_count < 0:
            raise ValueError(
                f"unknown_trip_count = {self.unknown_trip_count} must be 0 or more"
            )

    def line(self) -> str:
        """Return the rates in one line of text."""
        return (
            f"rates: dense products and attention {self.dense_flops_per_sec / 1e12:g} "
            f"TF/s, grouped {self.grouped_flops_per_sec / 1e12:g} TF/s on "
            f"{self.filled_rows:.3g} of the buffers' rows, HBM "
            f"{self.hbm_bytes_per_sec / 1e12:g} TB/s, NVLink "
            f"{self.nvlink_bytes_per_sec / 1e9:g} GB/s, InfiniBand "
            f"{self.infiniband_bytes_per_sec / 1e9:g} GB/s per direction; loops of "
            f"unknown length run {self.unknown_trip_count} times"
        )
