"""Configuration of how the experts are computed, and of recorded loads."""

import dataclasses
from typing import Literal

from moejax.config.checks import (
    MAX_INT32,
    STEPS,
    require,
    require_max,
    require_min,
)
from moejax.plan.groups import GROUP_AXES, Group
from moejax.plan.layout import (
    REPLICATING_SPLITS,
    Fp8,
    Gather,
    Kernels,
    Overflow,
    Split,
    Store,
)
from moejax.plan.schedule_rules import SCHEDULES, Schedule


@dataclasses.dataclass(frozen=True)
class Dispatch:
    """How rows reach experts, and how expert weights reach slots.

    A row is a token's activation on its way to one of its experts. A slot is room for
    the weights of one expert on a device. The defaults suit most runs: experts stay at
    their owners, every row arrives, and nothing is rounded.
    """

    exchange: Literal["exact", "capacity"] = "exact"
    """How rows beyond the buffers are treated. 'exact' carries every row, in as many
    rounds as that takes; 'capacity' drops and counts the rows that do not fit."""
    overflow: Overflow | None = None
    """How an exact step treats rows that round 0 of the exchange cannot carry.
    'rounds': later rounds carry them, in loops whose length only the devices know.
    'redo': the step has no such loops; where rows are left, it changes nothing, and the
    batch runs again with loops. None: 'redo' on GPUs, whose host waits at each loop,
    and 'rounds' on CPUs."""
    transport: Literal["padded", "ragged", "hierarchical"] = "padded"
    """How rows travel: an all_to_all of whole buffers ('padded'), of the filled rows
    alone ('ragged', GPUs only, and dangerous: docs/doctor.md), or of whole buffers over
    one mesh axis of the group after the other ('hierarchical')."""
    group: Group = "expert"
    """Devices between which rows travel. 'expert': those along the expert axis, with a
    group of its own for each index of data. 'data_expert': all of data x expert, so
    that the copies of experts that data parallelism holds anyway serve as replicas.
    'dc_expert': all of dc x expert, so that experts exist once over all data centres.
    """
    schedule: Literal["auto"] | Schedule = "auto"
    """Order of the collectives where there is a tensor axis (docs/communication.md).
    'auto' takes the schedule that is fastest by the speeds of Balance.calibration."""
    expert_shards: int | None = None
    """Number of parts into which the hidden width of each expert is cut. The parts lie
    along the tensor axis and, if there are more parts than it has devices, along part
    of the expert axis. None: as many parts as the tensor axis has devices."""
    domain: Literal["auto"] | tuple[int, int] | None = None
    """Size of a domain along (dc, expert), in devices. The devices of a domain gather
    one another's experts, so that rows travel between domains only. 'auto' takes the
    domain that is fastest by the speeds of Balance.calibration. None: (1, 1), each
    device alone; with Balance.policy='auto' the run begins so, and may change it."""
    compression: float | None = None
    """Target compression ratio of the experts that a domain gathers in training: 50
    sends 1/50 of the bytes. An owner sends the largest entries of the difference to the
    copies that the other devices hold (docs/compression.md). None: whole experts."""
    buffer_factor: float = 1.5
    """Size of the buffers of round 0 over the rows of an even load: of those that one
    device sends to another, and of those that a device computes. With 'capacity' it is
    GShard's capacity factor."""
    store: Store | None = None
    """How expert weights reach the slots (docs/balance.md), for the whole run. None:
    the run starts with the first store of Balance.policy, and the balancer may change
    to another one."""
    gather: Gather | None = None
    """When slots are gathered over data: in each layer of each micro-batch ('layer'),
    or once a step for all layers ('step', which takes memory: docs/balance.md). None:
    'step' on a GPU of known memory where that is less work and fits, else 'layer'."""
    slots_per_device: int | None = None
    """Number of slots of a device in each layer, at the start. None: one for each
    expert that the device owns, and one more where the policy replicates; groups of
    several axes and splits that make replicas get more (docs/balance.md)."""
    split: Split | None = None
    """Rule by which a row goes to one replica of its expert (docs/balance.md); None:
    the split of Balance.policy. 'top_up' copies a few more experts for a micro-batch
    whose fullest device is above `top_up_above`. 'dynamic' and 'shadow' make all
    replicas, for each micro-batch."""
    top_up_above: float = 1.05
    """Rows of the fullest device over the mean above which split 'top_up' copies
    experts: 1.0 evens all devices to one row, and a large number never copies any."""
    top_up_copies: int = 1
    """Maximum number of experts that one device takes as copies in each layer of a
    micro-batch with split 'top_up'; it offers at most twice as many."""
    kernels: Kernels = "auto"
    """Kernels of expert products and row permutations. 'auto': those made for the
    device, where there are some (docs/kernels.md); 'plain': XLA's operations alone."""
    fp8: Fp8 = "none"
    """8-bit format of the gradients that the experts' products multiply; their rows and
    weights are then rounded to e4m3 (docs/kernels.md). 'none': nothing is rounded."""
    prefetch: bool | None = None
    """Whether a layer's expert weights are fetched while the layer before computes:
    copies, slots of store='sharded', experts that a domain gathers, and what is
    gathered over data. None: with a domain, and on GPUs where data splits experts, yes;
    else as Balance.policy does."""

    def __post_init__(self) -> None:
        require_min(self, 1, "slots_per_device", "expert_shards")
        require_min(self, 1, "compression", "top_up_above", "top_up_copies")
        require(
            self.compression is None or self.domain not in (None, (1, 1)),
            f"Dispatch.compression={self.compression} compresses experts that a domain "
            "gathers, and Dispatch.domain is (1, 1), which gathers none: use a larger "
            "domain or 'auto', or compression=None",
        )
        require(
            self.buffer_factor > 0,
            f"Dispatch.buffer_factor={self.buffer_factor} must be > 0",
        )
        require(
            self.overflow is None or self.exchange == "exact",
            f"Dispatch.overflow={self.overflow!r} says how rows beyond the buffers "
            "travel, and Dispatch.exchange='capacity' drops them: leave "
            "Dispatch.overflow out",
        )

    @property
    def group_axes(self) -> tuple[str, ...]:
        """Names of the mesh axes of the group."""
        return GROUP_AXES[self.group]

    @property
    def makes_replicas(self) -> bool:
        """Whether the split makes the replicas too, in each micro-batch."""
        return self.split in REPLICATING_SPLITS

    @property
    def is_local(self) -> bool:
        """Whether the schedule places experts along the tensor axis."""
        return self.schedule != "auto" and SCHEDULES[self.schedule].is_local


Points = Literal["random", "spread"]


@dataclasses.dataclass(frozen=True)
class Recorded:
    """Expert loads that Router.kind='recorded' follows; benchmarks of skewed loads use
    them."""

    source: str = "zipf"
    """Name of a synthetic load ('uniform', 'zipf', 'one_hot', 'rotating', 'burst' or
    'wandering'), or the path of an .npz file of recorded loads."""
    zipf: float = 1.0
    """Exponent of source='zipf': expert i has load (i + 1) ** -zipf."""
    period_steps: int = 20
    """Period of a load that changes, in steps. 'rotating': time until the next expert
    becomes the hot one. 'burst': length of a phase with a hot expert, and of the even
    phase after it. 'wandering': time in which a hill of load rises, and in which it
    then moves on by one expert."""
    hot_share: float = 0.5
    """Share of all choices that the hot expert gets, 1/top_k at most; for 'rotating',
    'burst' and 'wandering'."""
    array: str = "tokens"
    """Name of the array in the .npz file that has the counts [samples, layers, ...,
    experts]; dims between layers and experts are summed."""
    steps_per_sample: int = 1
    """Number of training steps that follow one sample of the .npz file, or, with
    sample_per='micro_batch', of micro-batches."""
    sample_per: Literal["step", "micro_batch"] = "step"
    """What takes the next sample of the .npz file: every step, with the same loads in
    all of its micro-batches, or every micro-batch of every step. Other sources change
    by the step."""
    points: Points = "random"
    """How tokens draw their experts. 'random': each by itself, so that loads differ
    from the record by chance. 'spread': the draws of a device's tokens are spread
    evenly, so that its loads follow the record to within a few rows."""

    def __post_init__(self) -> None:
        require_min(self, 0, "zipf", "hot_share")
        require_max(self, 1, "it is a share", "hot_share")
        require_max(self, MAX_INT32, STEPS, "period_steps", "steps_per_sample")
        require_min(self, 1, "period_steps", "steps_per_sample")
