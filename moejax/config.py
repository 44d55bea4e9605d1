"""What a run is: frozen dataclasses that check themselves. Standard library only.

gin files bind these names (`Moe.top_k = 2`); `Config` holds one of each. A rule within
one class is checked when it is made, a rule between two when `Config` is.
"""

import dataclasses
import math
from typing import Any, Literal

from moejax.config_network import (
    Model,
    Moe,
    Recorded,
    Router,
    at_least,
    check_shards,
    require,
)
from moejax.plan.layout import Topology, uneven_group

__all__ = [
    "Balance", "Checkpoint", "Config", "Data", "Mesh", "Model", "Moe", "Optimizer",
    "Processes", "Recorded", "Router", "Train",
]  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Mesh:
    """Sizes of the four mesh axes; their product is the number of devices."""

    dc: int = 1
    data: int = 1
    expert: int = 1
    tensor: int = 1

    def __post_init__(self) -> None:
        at_least(self, 1, "dc", "data", "expert", "tensor")

    @property
    def topology(self) -> Topology:
        return Topology(self.dc, self.data, self.expert, self.tensor)


@dataclasses.dataclass(frozen=True)
class Optimizer:
    """AdamW with a warm-up and a decay of the learning rate."""

    learning_rate: float = 1e-3
    warmup_steps: int = 50
    decay: Literal["cosine", "linear", "constant"] = "cosine"
    final_lr_ratio: float = 0.1
    b1: float = 0.9
    b2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.1
    """On matrices only: not on norms, biases or embeddings."""
    clip_norm: float = 1.0
    max_skipped_in_a_row: int = 10
    """Non-finite updates are skipped; after so many in a row the run stops."""

    def __post_init__(self) -> None:
        at_least(
            self, 0, "learning_rate", "warmup_steps", "final_lr_ratio", "weight_decay",
            "clip_norm",
        )  # fmt: skip
        at_least(self, 1, "max_skipped_in_a_row")


@dataclasses.dataclass(frozen=True)
class Data:
    """Where tokens come from. A batch is a function of (corpus sha, seed, step)."""

    corpus: str | tuple[str, ...] = "pysrc"
    """'pysrc', the Python source of jax, flax, optax, orbax, grain; or a path or glob
    of .txt, .jsonl, .parquet, .npy or .bin files. Several are mixed."""
    weights: tuple[float, ...] | None = None
    """Share of each corpus in the batches; None: by their sizes."""
    tokenizer: str = "bytes"
    """'bytes', or the path of a Hugging Face tokenizers file (tokenizer.json)."""
    separator: str | int | None = None
    """Token, or its id, that starts each document; None: 0x00 for bytes, else the
    tokenizer's end of text."""
    text_key: str = "text"
    """Field of a JSONL record, or column of a parquet file, that holds the text."""
    documents: Literal["separate", "joined"] = "separate"
    """Separate: attention and positions end at the edges of documents."""
    seq_len: int = 256
    seed: int = 0
    held_out_every: int = 50
    """Every so many-th document is held out; of fewer documents, that share of the
    end."""
    max_bad_records: int = 100
    """Records that cannot be read are skipped and counted; more than so many stop."""
    log_samples: bool = False
    """Write the ids of the windows of each step to samples-<process>.jsonl."""

    def __post_init__(self) -> None:
        at_least(self, 2, "seq_len", "held_out_every")
        at_least(self, 0, "seed", "max_bad_records")
        require(
            self.weights is None or len(self.weights) == len(self.corpora),
            f"Data.weights={self.weights} must have one weight for each of "
            f"{len(self.corpora)} corpora",
        )
        require(
            self.weights is None or all(w > 0 for w in self.weights),
            f"Data.weights={self.weights} must all be above 0: leave a corpus out "
            "instead",
        )
        require(len(self.corpora) > 0, "Data.corpus=() names no data: name some")

    @property
    def corpora(self) -> tuple[str, ...]:
        return (self.corpus,) if isinstance(self.corpus, str) else self.corpus


@dataclasses.dataclass(frozen=True)
class Train:
    """The loop."""

    num_steps: int = 100
    batch_size: int = 32
    """Sequences per step over all devices and micro-batches."""
    accumulate_steps: int = 1
    """Micro-batches per step."""
    seed: int = 0
    logit_z_loss: float = 0.0
    loss_chunk: int = 256
    """Positions whose logits exist at one time in the loss."""
    eval_every_steps: int = 100
    eval_batches: int = 8
    """Held-out batches of batch_size sequences per evaluation, always the same."""
    log_load_every_steps: int = 10
    """metrics.jsonl has the load of every expert every so many steps."""
    run_dir: str | None = None
    """Default: runs/<name of the first gin file>."""
    num_simulated_devices: int | None = None
    """Simulate so many devices on the CPU; None uses the devices that are there."""
    peak_tflops: float | None = None
    """Of one device, for MFU; None looks the device up (a CPU is measured)."""

    def __post_init__(self) -> None:
        at_least(
            self, 1, "num_steps", "batch_size", "accumulate_steps", "loss_chunk",
            "eval_every_steps", "eval_batches", "log_load_every_steps",
            "num_simulated_devices",
        )  # fmt: skip
        require(
            self.batch_size % self.accumulate_steps == 0,
            f"Train.batch_size={self.batch_size} must be a multiple of "
            f"accumulate_steps={self.accumulate_steps}",
        )


@dataclasses.dataclass(frozen=True)
class Balance:
    """When load is uneven, and what is done about it (docs/balance.md)."""

    policy: str = "home"
    """A policy of moejax.balance.policies; 'home' changes nothing."""
    every_steps: int = 10
    """Decisions are taken at multiples of it."""
    lag_steps: int = 4
    """From the decision for a swap to its adoption, on every process."""
    relayout_lag_steps: int = 50
    """From the decision for a relayout: long enough to compile meanwhile."""
    act_above: float = 1.3
    """Device max/mean of the worst layer, forecast, above which a change is sought,"""
    rest_below: float = 1.1
    """until it is below this."""
    margin: float = 0.02
    """Share of a step's time that a change must save."""
    cooldown_steps: int = 20
    """From an adoption to the next decision."""
    horizon_steps: int = 1000
    """For so many steps a gain is counted."""
    half_life_steps: float = 10.0
    """Of the moving average of loads."""
    max_slots_per_device: int | None = None
    """None: twice the experts that a device owns, and two more."""
    calibration: str | None = None
    """JSON of tools/calibrate.py; None: presumed speeds, 50 TFLOP/s and 12.5 GB/s."""


@dataclasses.dataclass(frozen=True)
class Processes:
    """A run of several processes. How many there are, and where, is not configuration:
    the launcher says so (docs/processes.md)."""

    init_sec: int = 300
    """How long processes wait for one another at the start."""
    heartbeat_sec: int = 30
    """A process that has been silent for so long is dead, and ends all."""
    shutdown_sec: int = 30
    """How long processes wait for one another at the end."""
    watchdog_sec: int = 300
    """A step, evaluation or save that takes longer ends its process, with the stack of
    every thread; 0 never does."""

    def __post_init__(self) -> None:
        at_least(self, 1, "init_sec", "heartbeat_sec", "shutdown_sec")
        at_least(self, 0, "watchdog_sec")


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """When state is saved and what is kept."""

    every_steps: int = 100
    keep_last: int = 2
    keep_best: int = 1
    max_failed_saves: int = 3
    """Training goes on after a failed save, and stops after so many in a row."""

    def __post_init__(self) -> None:
        at_least(self, 1, "every_steps", "keep_last", "max_failed_saves")
        at_least(self, 0, "keep_best")


@dataclasses.dataclass(frozen=True)
class Config:
    """One run, whole: every rule between two parts has been checked."""

    mesh: Mesh = Mesh()
    model: Model = Model()
    moe: Moe = Moe()
    router: Router = Router()
    recorded: Recorded = Recorded()
    optimizer: Optimizer = Optimizer()
    data: Data = Data()
    train: Train = Train()
    checkpoint: Checkpoint = Checkpoint()
    processes: Processes = Processes()
    balance: Balance = Balance()

    def __post_init__(self) -> None:
        moe, mesh, train = self.moe, self.mesh, self.train
        check_shards(moe, mesh, self.expert_shards)
        uneven = uneven_group(moe.num_experts, self.group_size, self.group_axes)
        require(not uneven, f"Moe.{uneven}")
        shards = mesh.topology.num_batch_shards * train.accumulate_steps
        require(
            train.batch_size % shards == 0,
            f"Train.batch_size={train.batch_size} must be a multiple of {shards}: "
            f"dc x data x expert devices, accumulate_steps={train.accumulate_steps}",
        )
        simulated = train.num_simulated_devices
        require(
            simulated is None or simulated == mesh.topology.num_devices,
            f"Mesh ({mesh.topology}) has {mesh.topology.num_devices} devices, and "
            f"Train.num_simulated_devices={simulated}: make them equal",
        )
        groups = self.router.num_groups
        require(
            moe.num_experts % groups == 0
            and moe.top_k <= moe.num_experts // groups * self.router.top_groups,
            f"Router.num_groups={groups} must divide num_experts={moe.num_experts}, "
            f"and top_groups={self.router.top_groups} of them must hold "
            f"top_k={moe.top_k} experts",
        )
        require(
            self.data.seq_len % min(train.loss_chunk, self.data.seq_len) == 0,
            f"Data.seq_len={self.data.seq_len} must be a multiple of "
            f"Train.loss_chunk={train.loss_chunk}",
        )

    @property
    def expert_shards(self) -> int:
        """Parts of one expert's hidden width."""
        return self.moe.expert_shards or self.mesh.tensor

    @property
    def group_axes(self) -> tuple[str, ...]:
        """Mesh axes of the experts' owners."""
        return ("tensor",) if self.moe.schedule == "local" else self.moe.group_axes

    @property
    def group_size(self) -> int:
        """Owners of experts: devices of the group (Moe.group), times what the tensor
        axis has beside expert shards, over the shards that it has not."""
        size = math.prod(getattr(self.mesh, axis) for axis in self.group_axes)
        if self.moe.schedule == "local":
            return size
        return size * self.mesh.tensor // self.expert_shards

    def to_dict(self) -> dict[str, dict[str, Any]]:
        return dataclasses.asdict(self)
