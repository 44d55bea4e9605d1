"""Options for XLA on GPUs: set by the program, unless the user has set them."""

import pytest

from train.step.gpu_options import GPU_OPTIONS, compiler_options, options_line

SCHEDULER, OVERLAP = (option.name for option in GPU_OPTIONS)


def test_gpus_get_all_options_and_other_devices_none():
    assert compiler_options("gpu", {}) == {o.name: o.value for o in GPU_OPTIONS}
    for platform in ("cpu", "tpu"):
        assert compiler_options(platform, {}) == {}
        assert options_line(platform, {}) is None


@pytest.mark.parametrize("dashes", ["--", "-"])
def test_a_flag_of_the_user_goes_first(dashes):
    environ = {"XLA_FLAGS": f"--xla_dump_to=/x {dashes}{OVERLAP}=2"}
    assert compiler_options("gpu", environ) == {SCHEDULER: True}
    line = options_line("gpu", environ)
    assert f"{OVERLAP} as in XLA_FLAGS" in line
    assert f"{SCHEDULER}=True (" in line


def test_a_flag_with_a_longer_name_is_another_one():
    environ = {"XLA_FLAGS": f"--{OVERLAP}_more=2"}
    assert OVERLAP in compiler_options("gpu", environ)
