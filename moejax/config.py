"""What a run is: frozen dataclasses that check themselves. Standard library only.

gin files bind these names (`Moe.top_k = 2`); `Config` holds one of each. A rule within
one class is checked when it is made, a rule between two when `Config` is.

    Mesh                            devices (moejax.plan.layout.Topology)
    Model, Moe, Router              what the network is: the parameters of a checkpoint
    Dispatch                        how its experts are computed
    Recorded                        loads to follow instead of a router
    Optimizer, Data, Train          how it is trained
    Balance                         when experts move and are replicated
    Processes, Checkpoint           how a run lives on several machines, and survives
"""

import dataclasses
import math
from typing import Any, Literal

from moejax.plan.layout import (
    GROUP_AXES,
    Fp8,
    Group,
    Kernels,
    Split,
    Store,
    Topology,
    uneven_group,
)
from moejax.plan.parallel import Domain, Form, Tensor
from moejax.plan.schedule_rules import SCHEDULES, UNSPLIT, Schedule


def require(claim: bool, message: str) -> None:
    if not claim:
        raise ValueError(message)


def require_min(instance: Any, least: float, *names: str) -> None:
    for name in names:
        value = getattr(instance, name)
        part = type(instance).__mro__[-2].__name__  # of a subclass, what gin binds
        rule = f"{part}.{name}={value} must be at least {least}"
        require(value is None or value >= least, rule)


@dataclasses.dataclass(frozen=True)
class Model:
    """A decoder-only transformer. Layer i is dense when i < first_k_dense, else it is
    MoE when (i - first_k_dense + 1) is a multiple of moe_every."""

    vocab_size: int = 256
    d_model: int = 128
    num_layers: int = 4
    num_heads: int = 4
    num_kv_heads: int = 4
    head_dim: int = 32
    d_ff: int = 512
    """Hidden width of the SwiGLU in dense layers."""
    first_k_dense: int = 0
    moe_every: int = 1
    block: Literal["standard", "shortcut"] = "standard"
    """Shortcut: routed experts read the input of their layer's attention, and shared
    ones its output (docs/blocks.md)."""
    qk_norm: Literal["none", "head", "full"] = "none"
    """RMSNorm of queries and keys before RoPE: per head, or over all heads (OLMoE)."""
    tie_embeddings: bool = True
    rope_theta: float = 10_000.0
    norm_eps: float = 1e-6
    attention: Literal["xla", "cudnn"] = "xla"
    """Implementation of jax.nn.dot_product_attention; cudnn is fused, on GPUs."""
    remat: Literal["none", "dispatch", "full"] = "none"
    """What a layer keeps for its backward pass: everything; its routes and exchanged
    rows; its routes alone."""
    compute_dtype: Literal["float32", "bfloat16"] = "bfloat16"

    def __post_init__(self) -> None:
        require_min(
            self, 1, "vocab_size", "d_model", "num_layers", "num_heads", "num_kv_heads",
            "head_dim", "d_ff", "moe_every",
        )  # fmt: skip
        require_min(self, 0, "first_k_dense")
        require(
            self.num_heads % self.num_kv_heads == 0,
            f"Model.num_heads={self.num_heads} must be a multiple of "
            f"num_kv_heads={self.num_kv_heads}",
        )
        require(
            self.head_dim % 2 == 0,
            f"Model.head_dim={self.head_dim} must be even: RoPE turns pairs",
        )
        require(
            self.num_moe_layers >= 1
            and (self.num_layers - self.first_k_dense) % self.moe_every == 0,
            f"Model.num_layers={self.num_layers} minus first_k_dense="
            f"{self.first_k_dense} must be a multiple of moe_every={self.moe_every}, "
            "and at least one such multiple: a model needs an MoE layer",
        )

    @property
    def num_moe_layers(self) -> int:
        return (self.num_layers - self.first_k_dense) // self.moe_every


@dataclasses.dataclass(frozen=True)
class Moe:
    """The experts: what their parameters are. `Dispatch` says how they are computed."""

    num_experts: int = 8
    top_k: int = 2
    d_expert: int = 256
    """Hidden width f of one expert."""
    num_shared_experts: int = 0
    """Every token passes a dense SwiGLU of width num_shared_experts * d_expert too."""

    def __post_init__(self) -> None:
        require_min(self, 1, "num_experts", "top_k", "d_expert")
        require_min(self, 0, "num_shared_experts")
        require(
            self.top_k <= self.num_experts,
            f"Moe.top_k={self.top_k} is more than num_experts={self.num_experts}",
        )


@dataclasses.dataclass(frozen=True)
class Dispatch:
    """How rows reach experts and how expert weights reach slots. The defaults suit most
    runs: experts stay at their owners, every row arrives, nothing is rounded."""

    exchange: Literal["exact", "capacity"] = "exact"
    """Exact carries every row, in as many rounds as it takes; capacity drops some."""
    transport: Literal["padded", "ragged", "hierarchical"] = "padded"
    """all_to_all of whole buffers; of their rows alone (GPUs); and over one mesh axis
    of the group after the other."""
    group: Group = "expert"
    """Devices between which rows travel: those of one expert axis, each index of data a
    group of its own; or all of data x expert, so that the copies of experts that data
    parallelism holds anyway are replicas; or all of dc x expert: experts exist once
    over all data centres."""
    schedule: Literal["auto"] | Schedule = "auto"
    """Order of collectives where there is a tensor axis (docs/communication.md); 'auto'
    takes what Balance.calibration makes fastest."""
    expert_shards: int | None = None
    """Parts of one expert's hidden width, over the tensor axis and, if that has fewer
    devices, part of the expert axis; None: as many as the tensor axis has devices."""
    domain: Literal["auto"] | tuple[int, int] = (1, 1)
    """Devices along (dc, expert) that gather one another's experts, so that rows travel
    between such domains only; 'auto' takes what Balance.calibration makes fastest."""
    compression: Form = "none"
    """How gathered experts travel: whole, or in training as the largest entries of
    their difference to the experts' mean (residual, HybridEP's own baseline), or to
    what the others hold already (delta). docs/compression.md."""
    compression_ratio: float = 50.0
    """So many times fewer bytes."""
    gradient_compression: float | None = None
    """So many times fewer bytes for their gradients too: the largest entries travel,
    once a step, and a device keeps the rest for the next one. None: whole."""
    rows_per_peer: int | None = None
    """Rows that one device sends to one other in round 0; None derives it from
    buffer_factor times the even share."""
    buffer_factor: float = 1.5
    store: Store | None = None
    """How expert weights reach the slots (docs/balance.md), for the whole run; None:
    as Balance.policy is made for, and the balancer may choose another one."""
    slots_per_device: int | None = None
    """None: the experts that a device owns, and one where the policy replicates."""
    offers_per_device: int | None = None
    """Own experts that a device can give to others as copies; None: 2 at most."""
    copies_per_device: int | None = None
    """Copies that a device can hold; None: its slots beyond its own experts, or 1."""
    split: Split | None = None
    """Which replica a row goes to; None: as the policy reckons. 'dynamic' makes the
    replicas too, for each micro-batch."""
    fused_split: bool = False
    """Water-filling as one kernel, on Hopper GPUs."""
    kernels: Kernels = "auto"
    """The device's own, where it has some (docs/kernels.md), or XLA's alone (plain)."""
    fp8: Fp8 = "none"
    """Experts multiply 8-bit values, gradients in this format (docs/kernels.md)."""
    prefetch: bool | None = None
    """Transient copies travel a layer ahead; None: as the policy reckons."""

    def __post_init__(self) -> None:
        require_min(self, 1, "rows_per_peer", "slots_per_device", "expert_shards")
        require_min(self, 0, "offers_per_device", "copies_per_device")
        require_min(self, 1, "compression_ratio", "gradient_compression")
        for field, off in (("compression", "none"), ("gradient_compression", None)):
            value = getattr(self, field)
            require(
                value == off or self.domain != (1, 1),
                f"Dispatch.{field}={value!r} is of experts that a domain gathers, and "
                f"Dispatch.domain is (1, 1): use 'auto', a larger domain, or {off!r}",
            )
        require(
            self.buffer_factor > 0,
            f"Dispatch.buffer_factor={self.buffer_factor} must be > 0",
        )

    @property
    def group_axes(self) -> tuple[str, ...]:
        """Mesh axes of the group."""
        return GROUP_AXES[self.group]

    @property
    def is_local(self) -> bool:
        """Whether the schedule has experts along the tensor axis."""
        return self.schedule != "auto" and SCHEDULES[self.schedule].is_local


@dataclasses.dataclass(frozen=True)
class Router:
    """Who computes a token: scores, choice, gates and the losses that even the load.

    Losses are averaged over layers and micro-batches before their weight."""

    kind: Literal["softmax", "sigmoid", "expert_choice", "recorded"] = "softmax"
    normalise_gates: bool = True
    """Divide the chosen gates by their sum."""
    gate_scale: float = 1.0
    num_groups: int = 1
    top_groups: int = 1
    """Group-limited choice: only a token's best top_groups groups qualify."""
    jitter: float = 0.0
    """Training only: router input times uniform(1 - jitter, 1 + jitter)."""
    balance_loss: float = 0.01
    """Weight of Switch's load-balancing loss over the global batch."""
    sequence_balance_loss: float = 0.0
    """Weight of the same loss within each sequence (DeepSeek-V3)."""
    z_loss: float = 0.001
    mutual_information_loss: float = 0.0
    """Weight of minus the mutual information of token and expert: of few sure experts
    for each token and many for all (DS-MoE)."""
    training: Literal["sparse", "dense"] = "sparse"
    """Dense: in training every expert computes every token; evaluation and generation
    take the best top_k (docs/blocks.md)."""
    bias_rate: float = 0.0
    """Sigmoid: the expert bias moves by this much against the load each step."""
    allow_expert_choice_in_decoder: bool = False
    """Expert choice sees the future of the sequence that it routes."""

    def __post_init__(self) -> None:
        require_min(
            self,
            0,
            "jitter",
            "balance_loss",
            "sequence_balance_loss",
            "z_loss",
            "mutual_information_loss",
            "bias_rate",
        )
        require_min(self, 1, "num_groups", "top_groups")
        require(
            self.top_groups <= self.num_groups,
            f"Router.top_groups={self.top_groups} exceeds num_groups={self.num_groups}",
        )
        require(
            self.bias_rate == 0 or self.kind == "sigmoid",
            f"Router.bias_rate={self.bias_rate} steers kind='sigmoid' only, and kind "
            f"is '{self.kind}': set it to 0",
        )
        require(
            self.training == "sparse" or self.kind in ("softmax", "sigmoid"),
            f"Router.training='dense' weighs all experts by their scores, and kind is "
            f"'{self.kind}': use 'softmax' or 'sigmoid'",
        )
        require(
            self.kind != "expert_choice" or self.allow_expert_choice_in_decoder,
            "Router.kind='expert_choice' lets a token's experts depend on later "
            "tokens, and this model is a causal decoder: set "
            "Router.allow_expert_choice_in_decoder = True if you mean it",
        )


@dataclasses.dataclass(frozen=True)
class Recorded:
    """Loads that Router.kind='recorded' follows; benchmarks of skew use it."""

    source: str = "zipf"
    """'uniform', 'zipf', 'one_hot', 'rotating', 'burst', 'wandering', or the path of an
    .npz."""
    zipf: float = 1.0
    """Exponent: expert i has load (i + 1) ** -zipf."""
    period_steps: int = 20
    """rotating: the hot expert moves on after so many steps; burst: one hot phase and
    one even phase of so many steps each; wandering: a hill rises in so many steps, then
    moves by one expert in so many."""
    hot_share: float = 0.5
    """rotating, burst, wandering: share of all choices that the hot expert gets (at
    most 1/k)."""
    array: str = "tokens"
    """.npz: name of the counts, [samples, layers, ..., experts]; the dims between are
    summed."""
    steps_per_sample: int = 1
    """.npz: steps before the next sample."""

    def __post_init__(self) -> None:
        require_min(self, 0, "zipf", "hot_share")
        require_min(self, 1, "period_steps", "steps_per_sample")


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
        require_min(
            self, 0, "learning_rate", "warmup_steps", "final_lr_ratio", "weight_decay",
            "clip_norm",
        )  # fmt: skip
        require_min(self, 1, "max_skipped_in_a_row")


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
        require_min(self, 2, "seq_len", "held_out_every")
        require_min(self, 0, "seed", "max_bad_records")
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
        require_min(
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

    def __post_init__(self) -> None:
        require_min(
            self, 1, "every_steps", "rest_below", "horizon_steps", "half_life_steps",
            "max_slots_per_device",
        )  # fmt: skip
        require_min(self, 2, "lag_steps")
        require_min(self, 0, "margin", "cooldown_steps")
        require(
            self.rest_below < self.act_above,
            f"Balance.rest_below={self.rest_below} must be below "
            f"act_above={self.act_above}: the balancer acts above the one and rests "
            "below the other",
        )
        require(
            self.margin < 1,
            f"Balance.margin={self.margin} must be below 1: it is the share of a "
            "step's time that a change must save",
        )
        require(
            self.relayout_lag_steps >= self.lag_steps,
            f"Balance.relayout_lag_steps={self.relayout_lag_steps} must be at least "
            f"lag_steps={self.lag_steps}: a relayout has to be compiled too",
        )


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
        require_min(self, 1, "init_sec", "heartbeat_sec", "shutdown_sec")
        require_min(self, 0, "watchdog_sec")


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """When state is saved and what is kept."""

    every_steps: int = 100
    keep_last: int = 2
    keep_best: int = 1
    max_failed_saves: int = 3
    """Training goes on after a failed save, and stops after so many in a row."""

    def __post_init__(self) -> None:
        require_min(self, 1, "every_steps", "keep_last", "max_failed_saves")
        require_min(self, 0, "keep_best")


@dataclasses.dataclass(frozen=True)
class Network:
    """What a model is made of: all that `moejax.model` reads of a configuration."""

    model: Model
    moe: Moe
    router: Router
    documents: Literal["separate", "joined"] = "separate"
    """As Data.documents."""
    seq_len: int = 256
    """Tokens of a training window."""


@dataclasses.dataclass(frozen=True)
class Config:
    """One run, whole: every rule between two parts has been checked."""

    mesh: Topology = Topology()
    model: Model = Model()
    moe: Moe = Moe()
    dispatch: Dispatch = Dispatch()
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
        check_shards(self)
        uneven = uneven_group(moe.num_experts, self.group_size, self.group_axes)
        require(not uneven, f"Moe.{uneven}")
        shards = mesh.num_batch_shards * train.accumulate_steps
        require(
            train.batch_size % shards == 0,
            f"Train.batch_size={train.batch_size} must be a multiple of {shards}: "
            f"dc x data x expert devices, accumulate_steps={train.accumulate_steps}",
        )
        simulated = train.num_simulated_devices
        require(
            simulated is None or simulated == mesh.num_devices,
            f"Mesh ({mesh}) has {mesh.num_devices} devices, and "
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
        return self.dispatch.expert_shards or self.mesh.tensor

    @property
    def group_axes(self) -> tuple[str, ...]:
        """Mesh axes of the experts' owners."""
        return ("tensor",) if self.dispatch.is_local else self.dispatch.group_axes

    @property
    def group_size(self) -> int:
        """Owners of experts: devices of the group (Dispatch.group), times what the
        tensor axis has beside expert shards, over the shards that it has not."""
        size = math.prod(getattr(self.mesh, axis) for axis in self.group_axes)
        if self.dispatch.is_local:
            return size
        return size * self.mesh.tensor // self.expert_shards

    @property
    def network(self) -> Network:
        data = self.data
        return Network(self.model, self.moe, self.router, data.documents, data.seq_len)

    def to_dict(self) -> dict[str, dict[str, Any]]:
        return dataclasses.asdict(self)


def check_shards(cfg: Config) -> None:
    """Raise ValueError unless tensor axis, expert shards, schedule and domain go
    together."""
    mesh, shards, d_expert = cfg.mesh, cfg.expert_shards, cfg.moe.d_expert
    schedule, group, domain = (
        getattr(cfg.dispatch, name) for name in ("schedule", "group", "domain")
    )
    if mesh.tensor > 1 or shards > 1 or schedule != "auto":
        name = UNSPLIT if schedule == "auto" else schedule
        inner = Tensor(name, mesh.tensor, shards).inner.get("expert", 1)
        require(
            mesh.expert % inner == 0,
            f"Dispatch.expert_shards={shards} takes {inner} devices of the expert axis "
            f"({mesh.expert}) for each of tensor={mesh.tensor}: use a divisor",
        )
        require(
            d_expert % shards == 0,
            f"Moe.d_expert={d_expert} must be divisible by expert_shards={shards}",
        )
    require(
        not cfg.dispatch.is_local or (group == "expert" and domain == (1, 1)),
        f"Dispatch.schedule='{schedule}' has the experts along the tensor axis alone: "
        f"use Dispatch.group='expert' and Dispatch.domain=(1, 1), not '{group}' and "
        f"{domain}",
    )
    require(
        domain == (1, 1) or group != "data_expert",
        f"Dispatch.domain={domain} has sizes along dc and expert: use "
        "Dispatch.group='dc_expert' or 'expert', not 'data_expert'",
    )
    if isinstance(domain, tuple):
        Domain((mesh.dc if group == "dc_expert" else 1, mesh.expert), domain)
