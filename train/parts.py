"""How the layers of a run are cut over the mesh: owners, shards, tensor, domain."""

import dataclasses

from moejax.config import Config
from moejax.plan.parallel import Domain, Tensor


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
        size, (split, copies) = self.tensor.size, self._split_and_copies
        if tokens % split:
            raise ValueError(
                f"Dispatch.schedule='{self.tensor.schedule}' splits the {tokens} "
                "tokens of "
                f"a micro-batch and device over Mesh.tensor={size}: use a batch and "
                "length that it divides"
            )
        return tokens // split * copies

    def of_any_batch(self, tokens: int) -> "Parts":
        """These, or where the tensor axis does not divide so many tokens, s2, which
        routes them whole."""
        if self.tensor is None or tokens % self._split_and_copies[0] == 0:
            return self
        tensor = dataclasses.replace(self.tensor, schedule="s2")
        return dataclasses.replace(self, tensor=tensor)

    @property
    def _split_and_copies(self) -> tuple[int, int]:
        size, shards = self.tensor.size, self.tensor.expert_shards
        of_schedule = {
            "s1": (size, 1),
            "s1h": (size, 1),
            "base": (max(size // shards, 1), shards),
        }
        return of_schedule.get(self.tensor.schedule, (1, 1))


def micro_batch_tokens(cfg: Config) -> int:
    """Of one device, or of one tensor group."""
    shards = cfg.mesh.num_batch_shards * cfg.train.accumulate_steps
    return cfg.train.batch_size // shards * cfg.data.seq_len
