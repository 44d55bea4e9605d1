"""Descriptions of GPUs: those that ship, and what is said of a wrong one."""

import pytest

from moejax.kernels.device import is_hopper
from moejax.perf import target
from moejax.perf.target import CUDNN, FOLDER, load


@pytest.mark.parametrize("name", ["b200", "h100", "h200"])
def test_targets_that_ship(name):
    gpu = load(name)
    assert name in target.names()
    assert name.upper() in gpu.name
    text = gpu.proto()
    assert f"device_memory_size: {gpu.memory_bytes}\n" in text
    assert f"major: {gpu.capability[0]} minor: {gpu.capability[1]}" in text
    # A rate that a device is stated to reach is below its peak.
    assert gpu.rates.hbm_bytes_per_sec < gpu.memory_bytes_per_sec


def test_cudnn_is_that_of_the_constraints(repo):
    pins = (repo / "constraints.txt").read_text()
    assert f"nvidia-cudnn-cu13=={'.'.join(map(str, CUDNN))}." in pins


def test_a_file_of_the_users(tmp_path):
    path = tmp_path / "mine.toml"
    text = (FOLDER / "h100.toml").read_text()
    path.write_text(text.replace("NVIDIA H100 80GB HBM3", "NVIDIA H20"))
    gpu = load(str(path))
    assert gpu.rates == load("h100").rates
    assert gpu.name == "NVIDIA H20"


@pytest.mark.parametrize(
    ("old", "new", "match"),
    [
        ("num_cores = 132\n", "", "no field 'num_cores'"),
        ("num_cores", "num_core", "unknown field 'num_core'"),
        (
            "num_cores = 132",
            "num_cores = 132.5",
            "num_cores = 132.5 must be of type int",
        ),
        ("num_cores = 132", "num_cores = 0", "num_cores = 0 must be above 0"),
        ("2.6e12", "inf", "hbm_bytes_per_sec = inf must be above 0"),
        ("2.6e12", "true", "hbm_bytes_per_sec = True must be of type float"),
        ('"9.0"', '"9"', "compute_capability = '9' must be like '9.0'"),
        ("HBM3", "HBM3\\n", "must have no quote"),
        ("[rates]", "[rate]", "no table"),
        ("[rates]", "[rates", "not TOML"),
    ],
)
def test_a_wrong_file_is_refused_in_one_line(tmp_path, old, new, match):
    path = tmp_path / "mine.toml"
    text = (FOLDER / "h100.toml").read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))
    with pytest.raises(ValueError, match=match) as error:
        load(str(path))
    assert "mine.toml" in str(error.value)
    assert "\n" not in str(error.value)


def test_an_unknown_target_names_those_that_exist():
    with pytest.raises(ValueError, match="no target 'h101': give b200, h100, h200, or"):
        load("h101")


def test_hopper_is_what_the_kernels_take_for_hopper():
    from jax.sharding import AbstractDevice

    for name in target.names():
        gpu = load(name)
        device = AbstractDevice(gpu.name, num_cores=gpu.num_cores, platform="gpu")
        assert is_hopper(device) is (gpu.compute_capability == "9.0")
