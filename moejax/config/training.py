"""Configuration of how the network is trained, balanced, started and saved."""

import dataclasses
from typing import Literal

from moejax.config.checks import (
    MAX_INT32,
    MAX_SEED,
    MAX_WAIT_SEC,
    STEPS,
    require,
    require_max,
    require_min,
)


@dataclasses.dataclass(frozen=True)
class Optimizer:
    """Settings of the optimizer, and of the warm-up and decay of its learning rate."""

    name: Literal["adamw", "muon"] = "adamw"
    """Optimizer of the matrices that multiply activations in every layer, each expert's
    by itself. All other parameters (embedding, head, router, norms, biases) are
    AdamW's in either case (docs/decisions/0040-muon.md)."""
    learning_rate: float = 1e-3
    """Peak learning rate, at the end of the warm-up."""
    warmup_steps: int = 50
    """Number of steps in which the learning rate rises to its peak."""
    decay: Literal["cosine", "linear", "constant", "wsd"] = "cosine"
    """Shape of the learning rate from the end of the warm-up to the last step. 'wsd'
    (warm-up, stable, decay) is constant, and falls in the last `decay_share` of the
    steps."""
    decay_share: float = 0.2
    """Share of Train.num_steps in which 'wsd' decays."""
    final_lr_ratio: float = 0.1
    """Learning rate of the last step over the peak; 'constant' ignores it."""
    b1: float = 0.9
    """Decay rate of Adam's first moment, per step."""
    b2: float = 0.95
    """Decay rate of Adam's second moment, per step."""
    momentum: float = 0.95
    """Decay rate of Muon's average of gradients, per step."""
    mu_dtype: Literal["float32", "bfloat16"] = "float32"
    """Number format in which Adam's first moment and Muon's average rest; 'bfloat16'
    saves 2 bytes a parameter. The second moment and the update are float32
    (docs/decisions/0018-will-it-fit.md)."""
    eps: float = 1e-8
    """Number that Adam adds to the root of the second moment."""
    weight_decay: float = 0.1
    """Weight decay of matrices; norms, biases and embeddings have none."""
    clip_norm: float = 1.0
    """Largest global norm of the gradients, to which larger ones are scaled down; 0
    turns clipping off."""
    frozen: tuple[str, ...] = ()
    """Parameters that keep their values, without gradient, moment or decay:
    'embedding', 'head', 'attention', 'router', 'experts', 'shared', 'dense', 'norms',
    or patterns of names such as '*/attention/q_*' (moejax/model/parameters.py)."""
    max_skipped_in_a_row: int = 10
    """Number of non-finite updates in a row after which the run stops. Fewer are
    skipped."""

    def __post_init__(self) -> None:
        require_min(
            self, 0, "learning_rate", "warmup_steps", "final_lr_ratio", "weight_decay",
            "clip_norm",
        )  # fmt: skip
        require_min(self, 1, "max_skipped_in_a_row")
        require(
            0 < self.decay_share <= 1,
            f"Optimizer.decay_share={self.decay_share} must be above 0 and at most 1: "
            "it is the share of the steps in which the learning rate falls",
        )
        require(
            0 <= self.momentum < 1,
            f"Optimizer.momentum={self.momentum} must be at least 0 and below 1: an "
            "average with 1 never takes a gradient in",
        )
        require_max(self, MAX_INT32, STEPS, "warmup_steps", "max_skipped_in_a_row")


@dataclasses.dataclass(frozen=True)
class Data:
    """Corpora, tokenizer and windows of the training data.

    A batch is a function of (corpus sha, seed, step).
    """

    corpus: str | tuple[str, ...] = "pysrc"
    """Corpus, or several that are mixed. A corpus is 'pysrc', the Python source of jax,
    flax, optax, orbax and grain, or a path or glob of .txt, .jsonl or .parquet files,
    or a folder that tools/prepare.py made."""
    weights: tuple[float, ...] | None = None
    """Weight of each corpus in the batches; only their ratios count. None: the corpora
    are weighted by their sizes."""
    tokenizer: str = "bytes"
    """Tokenizer: 'bytes', or the path of a Hugging Face tokenizers file
    (tokenizer.json)."""
    separator: str | int | None = None
    """Token, or id of a token, that starts each document. None: 0x00 for bytes, else
    the tokenizer's end-of-text token."""
    end: str | int | None = None
    """Token, or id of a token, that the last token of a document predicts. None: the
    separator, which is then the end of a text too."""
    text_key: str = "text"
    """Field of a JSONL record, or column of a parquet file, that holds the text."""
    documents: Literal["separate", "joined"] = "separate"
    """Whether attention and positions stop at the edges of documents ('separate') or
    cross them ('joined')."""
    seq_len: int = 256
    """Length of a training sequence, in tokens."""
    seed: int = 0
    """Seed of the order in which windows are drawn from the corpora."""
    held_out_every: int = 50
    """Hold out every N-th document. A corpus with fewer than N documents gives up the
    last 1/N of its tokens."""
    log_samples: bool = False
    """Whether the ids of each step's windows are written to samples-<process>.jsonl."""

    def __post_init__(self) -> None:
        require_min(self, 2, "seq_len", "held_out_every")
        require_min(self, 0, "seed")
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
        require(len(self.corpora) > 0, "Data.corpus=() names no data: name a corpus")

    @property
    def corpora(self) -> tuple[str, ...]:
        """Corpora as a tuple, also where there is only one."""
        return (self.corpus,) if isinstance(self.corpus, str) else self.corpus


@dataclasses.dataclass(frozen=True)
class Train:
    """Settings of the training loop: steps, batches, evaluations and logs."""

    num_steps: int = 100
    """Number of training steps."""
    batch_size: int = 32
    """Number of sequences per step, over all devices and micro-batches."""
    accumulate_steps: int = 1
    """Number of micro-batches per step, whose gradients are averaged."""
    seed: int = 0
    """Seed of the initial parameters and of the random numbers of the steps."""
    logit_z_loss: float = 0.0
    """Weight of the z-loss of the output logits: the mean square of their logsumexp."""
    loss_chunk: int = 256
    """Number of positions of a sequence whose logits exist at one time in the loss."""
    eval_every_steps: int = 100
    """Number of steps from one evaluation to the next."""
    eval_batches: int = 8
    """Number of held-out batches per evaluation, of batch_size sequences each; they are
    always the same."""
    log_load_every_steps: int = 10
    """Number of steps from one record of all experts' loads in metrics.jsonl to the
    next."""
    log_sources: bool = False
    """Whether loads.jsonl records the same loads by the device that sends them, which
    tools/replay.py --run reads."""
    check_replicas_every_steps: int = 50
    """Number of steps from one comparison of replicated leaves to the next: parameters
    and other state that several devices hold must have equal bits on all of them. They
    are also compared before each save. 0: never."""
    run_dir: str | None = None
    """Directory of the run's files; None: runs/<name of the first gin file>."""
    num_simulated_devices: int | None = None
    """Number of devices to simulate on the CPU; None: the devices of this machine."""
    peak_tflops: float | None = None
    """Peak throughput of one device in TFLOP/s, for MFU (model FLOPs utilization).
    None: the value of a known GPU's data sheet."""

    def __post_init__(self) -> None:
        require_min(
            self, 1, "num_steps", "batch_size", "accumulate_steps", "loss_chunk",
            "eval_every_steps", "eval_batches", "log_load_every_steps",
            "num_simulated_devices",
        )  # fmt: skip
        require_min(self, 0, "check_replicas_every_steps")
        require_max(self, MAX_INT32, STEPS, "num_steps")
        require_max(self, MAX_SEED, "seeds have 64 bits", "seed")
        require_min(self, -MAX_SEED, "seed")


@dataclasses.dataclass(frozen=True)
class Balance:
    """Settings of the balancer, which moves and replicates experts when their load is
    uneven (docs/balance.md).

    A swap adopts another plan: which expert each slot holds. A relayout adopts a step
    that is compiled for another layout. The imbalance of a layer is its device
    max/mean: the rows of its fullest device over the mean device's.
    """

    policy: str = "home"
    """Name of a policy in moejax.balance.policies; 'home' never moves an expert, and
    'auto' begins as 'home' and takes the policy, store and split that the cost model
    and the race recommend for the loads that the run sees (docs/balance.md)."""
    every_steps: int = 10
    """Number of steps from one decision to the next; decisions are taken at multiples
    of it."""
    lag_steps: int = 4
    """Number of steps from the decision for a swap to its adoption by all processes.
    With 1 the step after a decision begins only when the host has decided."""
    relayout_lag_steps: int | None = None
    """Number of steps from the decision for a relayout to its adoption by all
    processes. They should take longer than the compilation. None: 50, and with policy
    'auto' as many as a compilation takes, which the run measures."""
    act_above: float = 1.3
    """Forecast imbalance of the worst layer above which the balancer starts to seek
    changes; it stops below a third of the excess over 1 (`rest_below`)."""
    margin: float = 0.02
    """Smallest gain of a change, as a share of the time per step of the layers that it
    changes."""
    cooldown_steps: int = 20
    """Number of steps to wait: from a swap to the next swap, from any change to the
    next relayout, and from a decision that nothing pays to the next decision."""
    horizon_steps: int = 1000
    """Number of steps over which the gain of a change is summed and compared with its
    cost."""
    half_life_steps: float = 10.0
    """Half-life of the moving averages of loads, in steps."""
    max_slots_per_device: int | None = None
    """Largest number of slots per device that a relayout can give. None: twice the
    experts that a device owns and two more, or the slots at the start if these are
    more."""
    calibration: str | None = None
    """Path of a JSON file of measured speeds that tools/calibrate.py wrote. None:
    presumed speeds, 50 TFLOP/s and 12.5 GB/s."""
    num_nodes: int = 1
    """Number of nodes among which 'eplb' shares out the groups of experts that
    Router.num_groups makes, and 'laer' the replicas of each expert: equal runs of
    consecutive devices of the group (Dispatch.group)."""

    def __post_init__(self) -> None:
        require_min(
            self, 1, "every_steps", "lag_steps", "horizon_steps", "half_life_steps",
            "max_slots_per_device", "num_nodes",
        )  # fmt: skip
        require_min(self, 0, "margin", "cooldown_steps")
        require(
            self.act_above > 1,
            f"Balance.act_above={self.act_above} must be above 1: a load that is even "
            "has a device max/mean of 1",
        )
        require(
            self.margin < 1,
            f"Balance.margin={self.margin} must be below 1: it is the share of its "
            "layers' time that a change must save",
        )
        require(
            self.relayout_lag_steps is None or self.relayout_lag_steps > self.lag_steps,
            f"Balance.relayout_lag_steps={self.relayout_lag_steps} must exceed "
            f"lag_steps={self.lag_steps}: a relayout is known lag_steps after its "
            "decision, and compiles from then until it is adopted",
        )

    @property
    def rest_below(self) -> float:
        """Forecast imbalance of the worst layer below which the balancer, once it seeks
        changes, stops: 1.1 for an act_above of 1.3."""
        return 1 + (self.act_above - 1) / 3


@dataclasses.dataclass(frozen=True)
class Processes:
    """Time limits of a run of several processes.

    The number of processes and their addresses are not configured here: the launcher
    passes them (docs/processes.md).
    """

    init_sec: int = 300
    """Longest time that processes wait for one another at the start, in seconds."""
    watchdog_sec: int = 300
    """Longest time of a step, an evaluation, or a save that writes nothing, in seconds.
    A process that takes longer prints the stack of each thread and ends; 0 means no
    limit. It is also the limit of checks at the start (docs/doctor.md)."""

    def __post_init__(self) -> None:
        require_min(self, 1, "init_sec")
        require_min(self, 0, "watchdog_sec")
        require_max(
            self, MAX_WAIT_SEC, "timers count 115 days at most", "init_sec",
            "watchdog_sec",
        )  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """When checkpoints are saved, and how many are kept."""

    every_steps: int = 100
    """Number of steps from one checkpoint to the next."""
    keep_last: int = 2
    """Number of newest checkpoints to keep."""
    keep_best: int = 1
    """Number of checkpoints with the lowest evaluation loss to keep."""

    def __post_init__(self) -> None:
        require_min(self, 1, "every_steps", "keep_last")
        require_min(self, 0, "keep_best")
