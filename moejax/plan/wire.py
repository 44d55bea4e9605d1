"""What rows cost on the wires between devices of a group, for splits: Wire."""

import dataclasses

WIRE_UNITS = 16
"""Weights of a Wire are whole sixteenths: splits are computed in integers."""
MOST_WEIGHT = 15


@dataclasses.dataclass(frozen=True)
class Wire:
    """What a received row costs a device, in rows computed: from another device of its
    node, and from another node. Nodes are devices of the group in a row."""

    devices_per_node: int
    near_weight: float
    far_weight: float

    def __post_init__(self) -> None:
        near, far = self.near_weight, self.far_weight
        is_whole = near * WIRE_UNITS % 1 == far * WIRE_UNITS % 1 == 0
        if not (is_whole and 0 <= near <= far <= MOST_WEIGHT and far > 0):
            raise ValueError(
                f"near_weight={near} and far_weight={far} must be multiples of "
                f"1/{WIRE_UNITS}, near <= far <= {MOST_WEIGHT}, and far above 0: use "
                "0.125 for a tenth, for example"
            )

    @property
    def costs(self) -> tuple[int, int, int]:
        """Of a row from the own device, node and from far, in sixteenths of a row."""
        weights = (0, self.near_weight, self.far_weight)
        return tuple(int((1 + weight) * WIRE_UNITS) for weight in weights)
