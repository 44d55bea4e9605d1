"""Make the weights of the tiny published models in tests/golden/hf, and write down what
`transformers` computes with them.

    python -m venv hf && hf/bin/pip install torch==2.13.0 transformers==5.23.0
    hf/bin/python tests/support/make_golden_hf.py [NAME ...]

A folder's config.json gives its architecture and sizes. Beside it come

model.safetensors   weights as `save_pretrained` writes them, float32. Each is a whole
                    number of quarters of its standard deviation: git packs it in a byte
expected.npz        input_ids, logits [2, 32, v], ce_loss, expert_ids [l, n, k] of the
                    MoE layers, grad_keys and grad_norms of ce_loss for all tensors, and
                    the gradients grad/KEY of those that GRADIENTS names

Correction biases are buffers: their gradients are written as zeros.
"""

import copy
import os
import pathlib
import re
import shutil
import sys
import tempfile

os.environ |= {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}

import numpy as np
import torch
import transformers
from safetensors.torch import load_file

ROOT = pathlib.Path(__file__).resolve().parents[1] / "golden" / "hf"
B, T = 2, 32
STD = {
    r"gate_up_proj$": {"gpt_oss": 0.5},  # so that the clamp at 7 acts
    r"sinks$": {"gpt_oss": 1.0},
    r"_a_proj": {"moonlight": 0.03125},  # so that the eps of the inner norms shows
}
"""Standard deviations other than 0.125, by the names of tensors and of folders."""
GRADIENTS = re.compile(
    r"layers\.0\.self_attn\..*|.*(gate|router|router\.layer|shared_expert_gate)\.weight"
    r"|.*layers\.1\.mlp\.experts\.5\..*"
)
"""Matrices whose gradients are kept; so are those of all vectors."""
MARGIN = 1e-3
"""Least distance between the last expert that is chosen and the first that is not, in
the scores by which a router chooses: no rounding of float32 changes a choice."""


def main(names: list[str]) -> None:
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    for name in names or sorted(path.name for path in ROOT.iterdir()):
        folder = ROOT / name
        model = make_model(folder)
        ids_bt, margin, expert_ids = choose_tokens(model)
        loss, expected = run(model, ids_bt)
        expected["expert_ids"] = expert_ids
        expected |= gradients(model, loss)
        np.savez_compressed(folder / "expected.npz", **expected)
        with tempfile.TemporaryDirectory() as saved:
            model.save_pretrained(saved)
            for file in ("model.safetensors", "generation_config.json"):
                shutil.copyfile(f"{saved}/{file}", folder / file)
        same = transformers.AutoModelForCausalLM.from_pretrained(
            folder, attn_implementation="eager", experts_implementation="eager"
        )
        _, again = run(same.eval(), ids_bt)
        assert np.array_equal(again["logits"], expected["logits"]), name
        print(f"{name}: loss {loss.item():.4f}, margin {margin:.1e}", flush=True)


def make_model(folder: pathlib.Path):
    """Return the model of a folder's config.json with random weights."""
    config = transformers.AutoConfig.from_pretrained(folder)
    config._experts_implementation = "eager"
    model = transformers.AutoModelForCausalLM.from_config(
        config, attn_implementation="eager", dtype=torch.float32
    )
    rng = np.random.default_rng(sum(folder.name.encode()))
    biases = [(n, b) for n, b in model.named_buffers() if "correction_bias" in n]
    with torch.no_grad():
        for name, value in sorted([*model.named_parameters(), *biases]):
            stds = (
                by_folder[folder.name]
                for pattern, by_folder in STD.items()
                if folder.name in by_folder and re.search(pattern, name)
            )
            quarters = np.rint(4 * rng.standard_normal(tuple(value.shape)))
            noise = torch.tensor(next(stds, 0.125) / 4 * quarters, dtype=torch.float32)
            value.copy_(1 + 2 * noise if name.endswith("norm.weight") else noise)
    return model.eval()


def run(model, ids_bt) -> tuple[torch.Tensor, dict[str, np.ndarray]]:
    """Return the mean loss of the next tokens, and the arrays of a forward pass."""
    output = model(input_ids=ids_bt, labels=ids_bt, use_cache=False)
    arrays = {
        "input_ids": ids_bt.numpy().astype(np.int32),
        "logits": output.logits.detach().numpy().copy(),
        "ce_loss": output.loss.detach().numpy().copy(),
    }
    return output.loss, arrays


def choose_tokens(model) -> tuple[torch.Tensor, float, np.ndarray]:
    """Return the first of 256 random inputs whose routing no rounding changes, or the
    one that is farthest from it, with its margin and its experts [l, n, k]."""
    best = (None, -1.0, np.array(()))
    for seed in range(256):
        generator = torch.Generator().manual_seed(seed)
        ids_bt = torch.randint(0, model.config.vocab_size, (B, T), generator=generator)
        margin, expert_ids = route(model, ids_bt)
        if margin > best[1]:
            best = ids_bt, margin, expert_ids
        if margin >= MARGIN:
            break
    return best


def route(model, ids_bt) -> tuple[float, np.ndarray]:
    """Return the smallest margin of all choices, and the chosen experts [l, n, k]."""
    routed: dict[int, tuple] = {}

    def keep(layer: int):
        def hook(router, args, output):
            routed[layer] = router, output

        return hook

    handles = [
        module.register_forward_hook(keep(int(found[1])))
        for name, module in model.named_modules()
        if "Router" in type(module).__name__
        and (found := re.search(r"layers\.(\d+)\.", name))
    ]
    with torch.no_grad():
        model(input_ids=ids_bt, use_cache=False)
    for handle in handles:
        handle.remove()
    choices = [choose(model.config, *routed[layer]) for layer in sorted(routed)]
    return min(margin for margin, _ in choices), np.stack([ids for _, ids in choices])


def choose(config, router, output) -> tuple[float, np.ndarray]:
    """Return the margin of a router's choices and its experts [n, k], by falling gate.
    The choice is made again here, and must be the router's."""
    top_k = getattr(config, "moe_k", None) or config.num_experts_per_tok
    if type(router).__name__ == "Llama4Router":
        gate_ne, logit_ne = output
        gate_nk, expert_nk = gate_ne.topk(top_k)
    else:
        logit_ne, gate_nk, expert_nk = output
    score_ne = logit_ne
    if hasattr(router, "e_score_correction_bias"):
        score_ne = logit_ne.sigmoid() + router.e_score_correction_bias
    elif hasattr(router, "moe_statics"):
        score_ne = logit_ne.softmax(-1) + router.moe_statics.e_score_correction_bias[0]
    elif type(router).__name__ != "Llama4Router":
        score_ne = logit_ne.softmax(-1)
    margin, groups = np.inf, getattr(router, "num_group", None) or 1
    if groups > 1 and getattr(router, "topk_method", "") != "greedy":
        score_nge = score_ne.unflatten(-1, (groups, -1))
        best = 2 if hasattr(router, "e_score_correction_bias") else 1
        group_ng = score_nge.topk(best)[0].sum(-1)
        ranked = group_ng.topk(router.topk_group + 1)[0]
        last_n1, refused_n1 = ranked[:, -2:-1], ranked[:, -1:]
        margin = (last_n1 - refused_n1).min().item()
        is_refused = (group_ng < last_n1)[..., None]
        score_ne = score_nge.masked_fill(is_refused, -torch.inf).flatten(1)
    best, ids = score_ne.topk(top_k + 1)
    margin = min(margin, (best[:, -2] - best[:, -1]).min().item())
    assert torch.equal(expert_nk.sort(-1)[0], ids[:, :top_k].sort(-1)[0])
    order = gate_nk.sort(dim=-1, descending=True, stable=True)[1]
    return margin, expert_nk.gather(-1, order).numpy().astype(np.int32)


def gradients(model, loss) -> dict[str, np.ndarray]:
    """Return the gradients of a loss by the names and in the layout of the file."""
    loss.backward()
    twin = copy.deepcopy(model)
    with torch.no_grad():
        for ours, its in zip(model.parameters(), twin.parameters()):
            its.copy_(torch.zeros_like(its) if ours.grad is None else ours.grad)
        for name, buffer in twin.named_buffers():
            if "correction_bias" in name:
                buffer.zero_()
    with tempfile.TemporaryDirectory() as folder:
        twin.save_pretrained(folder)
        grads = load_file(f"{folder}/model.safetensors")
    norms = [grad.double().norm().item() for grad in grads.values()]
    kept = {
        f"grad/{key}": grad.numpy()
        for key, grad in grads.items()
        if grad.ndim == 1 or GRADIENTS.fullmatch(key.removeprefix("model."))
    }
    return {"grad_keys": np.array(list(grads)), "grad_norms": np.array(norms), **kept}


if __name__ == "__main__":
    main(sys.argv[1:])
