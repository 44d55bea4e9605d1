"""The MoE layers of Qwen2-MoE and Qwen3-MoE, which both name in the same way."""

from moejax.interop.settings import Setting


class SparseLayers(Setting):
    """Layer i is an MoE layer if i + 1 is a multiple of decoder_sparse_step and i is
    not in mlp_only_layers."""

    def read(self, config, values) -> None:
        num_layers = values["model.num_layers"]
        step = config.whole("decoder_sparse_step", 1)
        dense = config.wholes("mlp_only_layers") or []
        values["layers.ff"] = tuple(
            "moe" if (i + 1) % step == 0 and i not in dense else "dense"
            for i in range(num_layers)
        )

    def write(self, values, record) -> None:
        kinds = values["layers.ff"]
        step = kinds.index("moe") + 1
        every = tuple("dense" if (i + 1) % step else "moe" for i in range(len(kinds)))
        if kinds != every:
            step = 1
        record["decoder_sparse_step"] = step
        record["mlp_only_layers"] = [
            i for i, kind in enumerate(kinds) if kind == "dense" and not (i + 1) % step
        ]
        values["layers.ff"] = ("moe",)
