"""Test which process of a run an environment describes, from a table of
environments."""

import subprocess
import sys
import zlib

import pytest

from train.launch.cluster import Flags, ProcessInfo, detect, expand_hosts, is_loopback

OURS = {
    "MOEJAX_COORDINATOR": "127.0.0.1:4242",
    "MOEJAX_NUM_PROCESSES": "4",
    "MOEJAX_PROCESS_ID": "3",
}
SLURM = {
    "SLURM_JOB_ID": "5000",
    "SLURM_STEP_ID": "2",
    "SLURM_STEP_NODELIST": "node[07-08]",
    "SLURM_NTASKS": "4",
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "1",
}
MPI4 = {
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_MCA_orte_hnp_uri": "1531576320.0;tcp://10.96.0.1,10.148.0.1:34911",
}
MPI5 = MPI4 | {"OMPI_MCA_orte_hnp_uri": "", "PMIX_NAMESPACE": "prterun-node1-77@1"}
SLURM_PORT = 61440 + 5002 % 4096
MPI4_PORT = 61440 + zlib.crc32(b"1531576320") % 4096
MPI5_PORT = 61440 + zlib.crc32(b"prterun-node1-77@1") % 4096


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
        {"JOB_COMPLETION_INDEX": "3"},  # an indexed job of single processes
        {"KUBERNETES_SERVICE_HOST": "10.0.0.1"},
        dict.fromkeys(OURS, ""),
    ],
)
def test_one_process_has_no_process_info(environ):
    assert detect(environ) is None
    assert detect(environ, Flags()) is None


@pytest.mark.parametrize(
    ("environ", "process"),
    [
        (OURS, ProcessInfo(4, 3, "127.0.0.1:4242", "MOEJAX")),
        (SLURM | OURS, ProcessInfo(4, 3, "127.0.0.1:4242", "MOEJAX")),
        (
            OURS | {"MOEJAX_LOCAL_NUM_PROCESSES": "4", "MOEJAX_LOCAL_PROCESS_ID": "3"},
            ProcessInfo(4, 3, "127.0.0.1:4242", "MOEJAX", 3, (3,)),
        ),
        (
            OURS | {"MOEJAX_PROCESS_ID": "", "JOB_COMPLETION_INDEX": "2"},
            ProcessInfo(4, 2, "127.0.0.1:4242", "Kubernetes"),
        ),
        (SLURM, ProcessInfo(4, 3, f"node07:{SLURM_PORT}", "SLURM", 1, (1,))),
        (
            SLURM | {"MOEJAX_COORDINATOR": "ib7:99"},
            ProcessInfo(4, 3, "ib7:99", "SLURM", 1, (1,)),
        ),
        (
            SLURM | {"SLURM_STEP_NODELIST": "node07", "SLURM_LOCALID": "3"},
            ProcessInfo(4, 3, f"127.0.0.1:{SLURM_PORT}", "SLURM", 3, (3,)),
        ),
        (
            SLURM | {"SLURM_STEP_NODELIST": "n[1-4]", "SLURM_LOCALID": "0"},
            ProcessInfo(4, 3, f"n1:{SLURM_PORT}", "SLURM", 0, None),
        ),
        (
            SLURM | {"CUDA_VISIBLE_DEVICES": "0,1,2,3,4,5,6,7"},
            ProcessInfo(4, 3, f"node07:{SLURM_PORT}", "SLURM", 1, (4, 5, 6, 7)),
        ),
        (
            SLURM | {"CUDA_VISIBLE_DEVICES": "5"},
            ProcessInfo(4, 3, f"node07:{SLURM_PORT}", "SLURM", 1, None),
        ),
        (
            SLURM | {"CUDA_VISIBLE_DEVICES": "0,1", "SLURM_GPUS_PER_TASK": "2"},
            ProcessInfo(4, 3, f"node07:{SLURM_PORT}", "SLURM", 1, None),
        ),
        (MPI4, ProcessInfo(4, 3, f"10.96.0.1:{MPI4_PORT}", "Open MPI", 1, (1,))),
        (
            SLURM | MPI4,
            ProcessInfo(4, 3, f"10.96.0.1:{MPI4_PORT}", "Open MPI", 1, (1,)),
        ),
        (
            MPI4 | {"OMPI_MCA_orte_hnp_uri": "1531576320.0;tcp6://[fe80::b9b]:43370"},
            ProcessInfo(4, 3, f"[fe80::b9b]:{MPI4_PORT}", "Open MPI", 1, (1,)),
        ),
        (
            MPI5 | {"OMPI_COMM_WORLD_LOCAL_SIZE": "4"},
            ProcessInfo(4, 3, f"127.0.0.1:{MPI5_PORT}", "Open MPI", 1, (1,)),
        ),
        (
            MPI5 | {"MOEJAX_COORDINATOR": "[fe80::1]:5"},
            ProcessInfo(4, 3, "[fe80::1]:5", "Open MPI", 1, (1,)),
        ),
    ],
)
def test_each_launcher_says_which_process_this_is(environ, process):
    assert detect(environ) == process


def test_flags_come_before_the_environment():
    process = detect(SLURM | OURS, Flags("node9:77", 2, 0))
    assert process == ProcessInfo(2, 0, "node9:77", "flags")
    assert detect(SLURM, Flags("node9:77", 1, 0)) is None


@pytest.mark.parametrize(
    ("environ", "flags", "words"),
    [
        (
            {},
            Flags(num_processes=4),
            "--num_processes=4 is set, but not --coordinator and",
        ),
        ({}, Flags("node1", 2, 0), "--coordinator='node1' must be HOST:PORT"),
        ({}, Flags("n:1", 2, 2), "--process_id=2 must be below --num_processes=2"),
        ({}, Flags("n:1", 2, -1), "--process_id='-1' must be a whole number"),
        ({}, Flags("n:1", 0, 0), "--num_processes=0 must be 1 or more"),
        (OURS | {"MOEJAX_PROCESS_ID": "4"}, None, "MOEJAX_PROCESS_ID=4 must be below"),
        (OURS | {"MOEJAX_PROCESS_ID": ""}, None, "but not MOEJAX_PROCESS_ID: set"),
        (OURS | {"MOEJAX_NUM_PROCESSES": "x"}, None, "MOEJAX_NUM_PROCESSES='x' must"),
        (OURS | {"MOEJAX_COORDINATOR": "h:0"}, None, "must be HOST:PORT"),
        (OURS | {"MOEJAX_COORDINATOR": "fe80::1:5"}, None, "must be HOST:PORT"),
        (OURS | {"MOEJAX_LOCAL_PROCESS_ID": "1"}, None, "set both, or none"),
        ({"MOEJAX_COORDINATOR": "h:1"}, None, "MOEJAX_NUM_PROCESSES and MOEJAX_PROCES"),
        (
            {"MOEJAX_COORDINATOR": "h:1", "JOB_COMPLETION_INDEX": "0"},
            None,
            "JOB_COMPLETION_INDEX=0 is set, but not MOEJAX_NUM_PROCESSES",
        ),
        (SLURM | {"SLURM_LOCALID": ""}, None, "but not SLURM_LOCALID: start with srun"),
        (SLURM | {"SLURM_PROCID": "7"}, None, "SLURM_PROCID=7 must be below SLURM_NT"),
        (SLURM | {"SLURM_STEP_NODELIST": "n[1-"}, None, "is not a list of hosts"),
        (SLURM | {"CUDA_VISIBLE_DEVICES": "0,1,2"}, None, "cannot share equally"),
        (
            MPI4 | {"OMPI_COMM_WORLD_RANK": ""},
            None,
            "but not OMPI_COMM_WORLD_RANK: start",
        ),
        (MPI5, None, "set MOEJAX_COORDINATOR=HOST:PORT"),
    ],
)
def test_incomplete_or_contradictory_settings_are_refused(environ, flags, words):
    """The message is one line that names the variables or flags."""
    with pytest.raises(ValueError) as refusal:
        detect(environ, flags)
    assert words in str(refusal.value)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    ("node_list", "hosts"),
    [
        ("gpu1", ["gpu1"]),
        ("gpu1,gpu2.example", ["gpu1", "gpu2.example"]),
        ("host[003-005,7],gpu1", ["host003", "host004", "host005", "host7", "gpu1"]),
        ("n[8-11]", ["n8", "n9", "n10", "n11"]),
        ("r[1-2]n[1,3]-ib", ["r1n1-ib", "r1n3-ib", "r2n1-ib", "r2n3-ib"]),
    ],
)
def test_node_lists_expand(node_list, hosts):
    assert expand_hosts(node_list) == hosts


@pytest.mark.parametrize(
    "text", ["", "n[", "n]", "n[]", "n[a]", "a,,b", ",a", "a,", "a b"]
)
def test_a_text_that_is_no_node_list_is_refused(text):
    with pytest.raises(ValueError, match="not a list of hosts"):
        expand_hosts(text)


@pytest.mark.parametrize(
    ("coordinator", "expected"),
    [
        ("127.0.0.1:80", True),
        ("127.3.2.1", True),
        ("localhost:1", True),
        ("[::1]:80", True),
        ("[::1]", True),
        ("::1", True),
        ("10.0.0.1:80", False),
        ("node1:80", False),
        ("127.example.org:80", False),
        ("[fe80::1]:80", False),
    ],
)
def test_loopback(coordinator, expected):
    assert is_loopback(coordinator) == expected
