"""Test the batch script of tools/launch/ with stubs of SLURM's commands, and the
JobSet."""

import dataclasses
import pathlib
import re
import stat
import subprocess
import sys

import pytest
import yaml

from train.launch import cluster

ROOT = pathlib.Path(__file__).resolve().parents[3]
SBATCH = ROOT / "tools" / "launch" / "slurm.sbatch"
JOBSET = ROOT / "tools" / "launch" / "jobset.yaml"
SRUN = """#!/bin/bash
echo "$*" | head -n 1 >> calls-srun
while [[ $1 == --* ]]; do shift; done
highest=0
for ((i = 0; i < SLURM_NTASKS; i++)); do
    SLURM_PROCID=$i SLURM_LOCALID=$((i % 2)) "$@"
    code=$?
    ((highest = code > highest ? code : highest))
done
exit ${KILLED:-$highest}
"""
SCONTROL = """#!/bin/bash
[[ $1 == show ]] && { echo node07; echo node08; exit; }
echo "$*" >> calls-scontrol
"""
PROGRAM = """#!/bin/bash
echo "$*" >> calls-program
env | grep ^MOEJAX_ | sort | xargs >> places
tries=$(wc -l < calls-srun)
codes=($CODES_BY_TRY)
((${ONLY:-$MOEJAX_PROCESS_ID} == MOEJAX_PROCESS_ID)) && exit ${codes[$((tries - 1))]}
exit 0
"""


@dataclasses.dataclass(frozen=True)
class Job:
    """A finished batch job: its exit code, its folder and its output."""

    code: int
    folder: pathlib.Path
    out: str

    def calls(self, name: str) -> list[str]:
        path = self.folder / f"calls-{name}"
        return path.read_text().splitlines() if path.exists() else []


def submit(folder: pathlib.Path, codes: str, num_nodes: int = 2, **environ) -> Job:
    """Run the batch script with stubs of srun, scontrol and the program."""
    for name, text in (("srun", SRUN), ("scontrol", SCONTROL), ("python", PROGRAM)):
        path = folder / name
        path.write_text(text)
        path.chmod(path.stat().st_mode | stat.S_IXUSR)
    env = {
        "PATH": f"{folder}:/usr/bin:/bin",
        "PYTHON": str(folder / "python"),
        "BACKOFF_SEC": "0",
        "CODES_BY_TRY": codes,
        "SLURM_JOB_ID": "5000",
        "SLURM_JOB_NUM_NODES": str(num_nodes),
        "SLURM_JOB_NODELIST": "node[07-08]",
        "SLURM_NTASKS": "4",
        "SLURM_NTASKS_PER_NODE": "2",
    }
    result = subprocess.run(
        ["bash", str(SBATCH), "--gin_file=a b.gin"],
        cwd=folder,
        env=env | environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert not list(folder.glob("slurm-*")), "the codes are removed"
    return Job(result.returncode, folder, result.stdout)


def test_every_task_gets_its_process_index(tmp_path):
    job = submit(tmp_path, "0")
    assert job.code == 0, job.out
    address = f"node07:{61440 + 5000 % 4096}"
    places = (tmp_path / "places").read_text().splitlines()
    for index, line in enumerate(places):
        environ = dict(word.split("=", 1) for word in line.split())
        assert place(environ) == (address, 4, index)
        assert cluster.visible_gpus(environ) == str(index % 2)
    assert len(places) == 4
    assert job.calls("program")[0] == "train/main.py --gin_file=a b.gin"
    assert "--kill-on-bad-exit=1" in job.calls("srun")[0]


def test_on_one_node_the_coordinator_is_loopback(tmp_path):
    submit(tmp_path, "0", num_nodes=1)
    assert "MOEJAX_COORDINATOR=127.0.0.1:" in (tmp_path / "places").read_text()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("codes", "environ", "code", "num_tries"),
    [
        ("75", {}, 75, 1),
        ("2", {"ONLY": "1", "KILLED": "137"}, 2, 1),  # the others were killed
        ("3", {}, 3, 1),
        ("134 75", {}, 75, 2),
        ("1 134 0", {}, 0, 3),
        ("1 1 1 7", {"MAX_RESTARTS": "3"}, 7, 4),
    ],
)
def test_the_exit_code_decides(tmp_path, codes, environ, code, num_tries):
    """A job that was stopped, and has saved, is queued again."""
    job = submit(tmp_path, codes, **environ)
    assert job.code == code, job.out
    assert len(job.calls("srun")) == num_tries
    assert job.calls("scontrol") == ["requeue 5000"] * (code == 75)
    ports = set(re.findall(r"node07:(\d+)", (tmp_path / "places").read_text()))
    assert len(ports) == num_tries


@pytest.mark.parametrize(("requeues", "attempts"), [(None, "012"), (2, "678")])
def test_only_the_first_start_of_a_job_is_attempt_0(tmp_path, requeues, attempts):
    environ = {} if requeues is None else {"SLURM_RESTART_COUNT": str(requeues)}
    submit(tmp_path, "1 1 0", MAX_RESTARTS="2", MOEJAX_ATTEMPT="5", **environ)
    places = (tmp_path / "places").read_text()
    numbers = re.findall(rf"{cluster.ATTEMPT}=(\d+)", places)
    assert numbers == [attempt for attempt in attempts for _ in range(4)]


def test_the_task_waits_for_a_program_that_saves_on_sigterm(tmp_path):
    task = re.search(r"\ntask='\n(.*?)'\n", SBATCH.read_text(), re.DOTALL)[1]
    program = (
        "import os, signal, sys, time\n"
        "signal.signal(signal.SIGTERM, lambda *_: (time.sleep(0.2), sys.exit(75)))\n"
        "os.kill(os.getppid(), signal.SIGTERM)\n"
        "os.kill(os.getpid(), signal.SIGTERM)\n"
    )
    names = ("NTASKS", "PROCID", "NTASKS_PER_NODE", "LOCALID")
    env = {f"SLURM_{name}": "0" for name in names} | {"CODES": str(tmp_path)}
    words = ["bash", "-c", task, "task", sys.executable, "-c", program]
    subprocess.run(words, env=env, check=True)
    assert (tmp_path / "0").read_text() == "75\n"


def test_the_jobset_describes_one_run():
    """The pods are the processes of a run, and know how often it has restarted. Codes
    that forbid a restart fail the set."""
    jobset = yaml.safe_load(JOBSET.read_text())
    [workers] = jobset["spec"]["replicatedJobs"]
    job, pod = workers["template"]["spec"], workers["template"]["spec"]["template"]
    assert workers["replicas"] == 1
    assert job["completionMode"] == "Indexed"
    assert job["completions"] == job["parallelism"]
    assert job["backoffLimit"] == 0
    [rule] = job["podFailurePolicy"]["rules"]
    assert (rule["action"], rule["onExitCodes"]["values"]) == ("FailJob", [2, 3])
    [rule] = jobset["spec"]["failurePolicy"]["rules"]
    reasons = {"onJobFailureReasons": ["PodFailurePolicy"]}
    assert rule == {"action": "FailJobSet"} | reasons
    assert pod["spec"]["restartPolicy"] == "Never"
    assert pod["spec"]["terminationGracePeriodSeconds"] == 120
    [container] = pod["spec"]["containers"]
    assert container["resources"]["limits"]["nvidia.com/gpu"] > 0
    mounts = {mount["name"] for mount in container["volumeMounts"]}
    assert mounts == {volume["name"] for volume in pod["spec"]["volumes"]}
    sources = {word["name"]: word.get("valueFrom") for word in container["env"]}
    path = "metadata.annotations['jobset.sigs.k8s.io/restart-attempt']"
    assert sources[cluster.ATTEMPT] == {"fieldRef": {"fieldPath": path}}
    env = {word["name"]: word.get("value") for word in container["env"]}
    assert env[cluster.PROCESS_ID] is env.pop(cluster.ATTEMPT) is None
    assert int(env[cluster.NUM_PROCESSES]) == job["completions"]
    name, domain = jobset["metadata"]["name"], jobset["spec"]["network"]["subdomain"]
    first = f"{name}-{workers['name']}-0-0.{domain}"
    [port] = [port["containerPort"] for port in container["ports"]]
    for index in range(job["completions"]):
        env[cluster.PROCESS_ID] = str(index)
        assert place(env) == (f"{first}:{port}", 2, index)


def place(environ: dict[str, str]) -> tuple[str, int, int]:
    """Return address, number of processes and index that variables give."""
    found = cluster.detect(environ)
    names = ("coordinator_address", "num_processes", "process_id")
    return tuple(found[name] for name in names)
