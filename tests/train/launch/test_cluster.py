"""Which process of a run an environment describes, from a table of environments."""

import subprocess
import sys

import pytest

from train.launch.cluster import detect, visible_gpus

OURS = {
    "MOEJAX_COORDINATOR": "127.0.0.1:4242",
    "MOEJAX_NUM_PROCESSES": "4",
    "MOEJAX_PROCESS_ID": "3",
}
OURS_LOCAL = {"MOEJAX_LOCAL_NUM_PROCESSES": "2", "MOEJAX_LOCAL_PROCESS_ID": "1"}
SLURM = {
    "SLURM_JOB_ID": "5000",
    "SLURM_STEP_NODELIST": "node[07-08]",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_NTASKS": "4",
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "1",
}
MPI = {
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_MCA_orte_hnp_uri": "1531576320.0;tcp://10.96.0.1,10.148.0.1:34911",
}


def test_it_imports_without_jax():
    code = "import sys, train.launch.cluster; sys.exit('jax' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize(
    "environ",
    [
        {},
        {"PATH": "/bin", "SLURM_JOB_ID": "5", "SLURM_NTASKS": "8"},  # no srun
        SLURM | {"SLURM_NTASKS": "1", "SLURM_PROCID": "0", "SLURM_LOCALID": "0"},
        OURS | {"MOEJAX_NUM_PROCESSES": "1", "MOEJAX_PROCESS_ID": "0"},
        SLURM | {"MOEJAX_NUM_PROCESSES": "1"},
        {"KUBERNETES_SERVICE_HOST": "10.0.0.1"},
        dict.fromkeys(OURS, ""),
    ],
)
def test_one_process_joins_nobody(environ):
    assert detect(environ) is None


@pytest.mark.parametrize("environ", [SLURM, MPI, MPI | {"SLURM_NTASKS": "2"},
                                     {"JOB_COMPLETION_INDEX": "3"}])  # fmt: skip
def test_jax_reads_the_variables_of_other_launchers(environ):
    assert detect(environ) == {}


@pytest.mark.parametrize(
    ("address", "bind"),
    [
        ("127.0.0.1:4242", "127.0.0.1:4242"),
        ("localhost:4242", "localhost:4242"),
        ("[::1]:4242", "[::1]:4242"),
        ("node7:99", None),
        ("[fe80::1]:99", None),
    ],
)
@pytest.mark.parametrize("other", [{}, SLURM, MPI])
def test_our_variables_win_and_loopback_is_not_left(other, address, bind):
    assert detect(other | OURS | {"MOEJAX_COORDINATOR": f" {address}"}) == {
        "coordinator_address": address,
        "num_processes": 4,
        "process_id": 3,
        "cluster_detection_method": "deactivate",
        "coordinator_bind_address": bind,
    }


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"MOEJAX_PROCESS_ID": ""}, "is set, but not MOEJAX_PROCESS_ID: set all"),
        ({"MOEJAX_COORDINATOR": ""}, "is set, but not MOEJAX_COORDINATOR: set all"),
        ({"MOEJAX_PROCESS_ID": "4"}, "=4 must be a whole number above .*_ID=4"),
        ({"MOEJAX_PROCESS_ID": "-1"}, "_ID=-1, which is one of 0 or more"),
        ({"MOEJAX_NUM_PROCESSES": "x"}, "=x must be a whole number"),
        ({"MOEJAX_COORDINATOR": "node7"}, "'node7' must be HOST:PORT"),
        ({"MOEJAX_COORDINATOR": "http://node7:1"}, "must be HOST:PORT"),
    ],
)
def test_bad_variables_are_refused_in_one_line(change, words):
    with pytest.raises(ValueError, match=words) as error:
        detect(OURS | change)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("environ", "gpus"),
    [
        ({}, "all"),
        (OURS, "all"),
        (OURS_LOCAL, "1"),
        (OURS_LOCAL | {"JAX_LOCAL_DEVICE_IDS": "0,1"}, "0,1"),
        (MPI, "1"),
        (SLURM, "1"),
        (SLURM | {"SLURM_NTASKS": "2", "SLURM_LOCALID": "0"}, "all"),  # alone on a node
        (SLURM | {"SLURM_GPUS_PER_TASK": "1"}, "all"),  # SLURM shows each task its own
        (SLURM | {"CUDA_VISIBLE_DEVICES": "0,1,2,3"}, "2,3"),
        (OURS_LOCAL | {"CUDA_VISIBLE_DEVICES": "4,5,6,7"}, "2,3"),
        (OURS_LOCAL | {"CUDA_VISIBLE_DEVICES": "5"}, "all"),
        (MPI | {"OMPI_COMM_WORLD_LOCAL_SIZE": "1",
                "OMPI_COMM_WORLD_LOCAL_RANK": "0"}, "all"),
    ],
)  # fmt: skip
def test_the_processes_of_a_host_share_its_gpus(environ, gpus):
    assert visible_gpus(environ) == gpus


def test_gpus_that_cannot_be_shared_are_refused():
    with pytest.raises(ValueError, match="names 3 GPUs, which 2 processes"):
        visible_gpus(OURS_LOCAL | {"CUDA_VISIBLE_DEVICES": "0,1,2"})
    with pytest.raises(ValueError, match="is set, but not SLURM_STEP_NUM_NODES"):
        visible_gpus({"SLURM_STEP_NODELIST": "n1", "SLURM_NTASKS": "2"})
