"""Folders as transformers 5 has them in memory: experts of a layer in one tensor.

Those that its own save_pretrained(save_original_format=False) wrote, of all families
here, were compared by hand; the names below are theirs.
"""

import json
import re

import numpy as np
import pytest

from moejax.interop import tree
from moejax.interop.folder import TensorFolder
from moejax.interop.published import open_model
from tests.support.golden_hf import ROOT
from tests.support.tensor_folders import BF16, SINGLE, write_arrays

OF_EXPERTS = {
    "gate_proj": 0, "up_proj": 1, "down_proj": 2, "w1": 0, "w3": 1, "w2": 2,
}  # fmt: skip
RENAMED = {
    "mixtral": [("block_sparse_moe", "mlp")],
    "granitemoe": [
        ("input_linear.weight", "experts.gate_up_proj"),
        ("output_linear.weight", "experts.down_proj"),
        ("router.layer", "router"),
    ],
    "ernie4_5_moe": [("mlp.moe_statics", "mlp.gate.moe_statics")],
}
FAMILIES = ["qwen3_moe", "deepseek_v3", *RENAMED]


def fuse(name: str) -> dict[str, np.ndarray]:
    """Return the tensors of a published folder under fused names."""
    fused, experts = {}, {}
    for published, array in TensorFolder(ROOT / name).arrays.items():
        key = published
        for before, after in RENAMED.get(name, ()):
            key = key.replace(before, after)
        if found := re.search(r"(.*experts\.)(\d+)\.(\w+)\.weight$", key):
            at = found[1], int(found[2])
            experts.setdefault(at, {})[OF_EXPERTS[found[3]]] = array
        else:
            fused[key] = array
    for at in dict.fromkeys(at for at, _ in experts):
        of_layer = [experts[at, i] for i in range(sum(at == a for a, _ in experts))]
        both = [np.concatenate([own[0], own[1]]) for own in of_layer]
        fused[f"{at}gate_up_proj"] = np.stack(both)
        fused[f"{at}down_proj"] = np.stack([own[2] for own in of_layer])
    return fused


def write(folder, name: str, tensors: dict[str, np.ndarray], **changes):
    config = json.loads((ROOT / name / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps(config))
    write_arrays(folder / SINGLE, tensors)
    return folder


def leaves_of(model) -> dict[str, np.ndarray]:
    views = tree.as_leaves(model.params) | tree.as_leaves(model.router_bias)
    return {path: view.read() for path, view in views.items()}


@pytest.mark.parametrize("name", FAMILIES)
def test_fused_experts_are_those_of_the_published_folder(name, tmp_path):
    fused = fuse(name)
    assert any(key.endswith("experts.gate_up_proj") for key in fused)
    assert not any("experts.0." in key or "input_linear" in key for key in fused)
    ours = leaves_of(open_model(write(tmp_path, name, fused)))
    theirs = leaves_of(open_model(ROOT / name))
    assert ours.keys() == theirs.keys()
    for path, array in theirs.items():
        np.testing.assert_array_equal(ours[path], array, err_msg=path)


def test_fused_experts_that_contradict_the_configuration(tmp_path):
    for cut in (np.s_[:4], np.s_[:, :8]):
        tensors = fuse("mixtral")
        name = "model.layers.0.mlp.experts.gate_up_proj"
        tensors[name] = tensors[name][cut]
        folder = write(tmp_path, "mixtral", tensors)
        message = r"experts.gate_up_proj' has shape .*, and config.json says \[8"
        with pytest.raises(ValueError, match=message):
            open_model(folder)


def test_layers_of_several_dtypes_are_read_without_rounding(tmp_path):
    """One layer in float32 and the others in bfloat16, as after a merge."""
    tensors = dict(TensorFolder(ROOT / "mixtral").arrays)
    expected = leaves_of(open_model(ROOT / "mixtral"))
    name = "model.layers.1.self_attn.q_proj.weight"
    tensors = {key: array.astype(BF16) for key, array in tensors.items()}
    bias = np.float32(2**-20)  # bfloat16 would round it away
    tensors[name] = tensors[name].astype(np.float32) + bias
    model = open_model(write(tmp_path, "mixtral", tensors))
    (note,) = model.notes
    assert f"'{name}' is float32" in note
    assert "--dtype=float32" in note
    ours = leaves_of(model)
    path = "cycles.blocks.0.attention.q_dhi"
    np.testing.assert_array_equal(ours[path][1].T, tensors[name])
    assert ours[path].dtype == np.float32
    rounded = expected[path][0].astype(BF16).astype(np.float32)
    np.testing.assert_array_equal(ours[path][0], rounded)
    assert ours["cycles.blocks.0.attention.k_dgi"].dtype == BF16
