"""How the layers of a run are cut over the mesh: owners, shards, tensor, domain."""

import dataclasses

from moejax.config import Config
from moejax.plan.parallel import Domain, Tensor
from moejax.plan.schedule_rules import UNSPLIT


@dataclasses.dataclass(frozen=True)
class Parts:
    axes: tuple[str, ...]
    """Mesh axes of the group: Layout.axes."""
    num_owners: int
    tensor: Tensor | None
    domain: Domain | None

    @property
    def fields(self) -> dict:
        """Of a Layout."""
        return {"axes": self.axes, "tensor": self.tensor, "domain": self.domain}

    def source_tokens(self, tokens: int) -> int:
        """Of so many tokens of a tensor group, those that one source of the layer has.

        ValueError where the tensor axis does not divide them.
        """
        if self.tensor is None:
            return tokens
        tensor = self.tensor
        if tokens % tensor.num_parts:
            raise ValueError(
                f"Dispatch.schedule='{tensor.schedule}' splits the {tokens} tokens "
                "of a "
                f"micro-batch and device over Mesh.tensor={tensor.size}: use a batch "
                "and length that it divides"
            )
        return tokens // tensor.num_parts * tensor.num_gathered

    def of_any_batch(self, tokens: int) -> "Parts":
        """These, or where the tensor axis does not divide so many tokens, those of a
        schedule that routes them whole."""
        if self.tensor is None or tokens % self.tensor.num_parts == 0:
            return self
        tensor = dataclasses.replace(self.tensor, schedule=UNSPLIT)
        return dataclasses.replace(self, tensor=tensor)


def micro_batch_tokens(cfg: Config) -> int:
    """Of one device, or of one tensor group."""
    shards = cfg.mesh.num_batch_shards * cfg.train.accumulate_steps
    return cfg.train.batch_size // shards * cfg.data.seq_len
