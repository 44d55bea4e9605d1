"""What the batches of a run depend on, as a record for checkpoints."""

from typing import Any

from moejax.config import Data
from train.data.corpus import Corpus


def identity(corpus: Corpus, cfg: Data, batch_size: int) -> dict[str, Any]:
    """All that the batch of a step and the held-out text depend on, as JSON has it.

    Paths are not part of it: a run may go on after its data has moved.
    """
    return {
        "name": corpus.name,
        "sha256": corpus.sha256,
        "weights": list(corpus.weights),
        "tokenizer_sha256": corpus.tokenizer.sha256,
        "separator": corpus.tokenizer.separator,
        "documents": cfg.documents,
        "held_out_every": cfg.held_out_every,
        "seed": cfg.seed,
        "seq_len": cfg.seq_len,
        "batch_size": batch_size,
    }


def check_identity(saved: dict[str, Any], current: dict[str, Any]) -> None:
    """Raises ValueError, naming every difference, unless both are the same data.

    The same contents by another name are the same data.
    """
    differences = [
        f"{name} was {saved.get(name)}, is {current.get(name)}"
        for name in dict.fromkeys([*saved, *current])
        if saved.get(name) != current.get(name)
    ]
    if saved.get("sha256") == current.get("sha256"):
        differences = [line for line in differences if not line.startswith("name ")]
    if differences:
        raise ValueError(
            f"the checkpoint was trained on other data: {'; '.join(differences)}: give "
            "the run what it had, or another run directory"
        )
