"""All kinds of faults. A new kind is one entry here and one function."""

from tools.faults import damage, disks, signals, values
from tools.faults.fault import Fault

FAULTS = (
    Fault(
        "kill",
        "all end in 5 s, start again, lose nothing that was saved",
        "running",
        signals.kill,
        may_be_early=True,
    ),
    Fault(
        "kill the launcher",
        "its processes end in 5 s",
        "running",
        signals.kill_launcher,
        may_be_early=True,
    ),
    Fault(
        "stop for ever",
        "all end 5 s after --stopped_sec, and start again",
        "running",
        signals.stop_for_ever,
        may_be_early=True,
    ),
    Fault(
        "stop for a second",
        "nothing happens",
        "running",
        signals.stop_for_a_second,
    ),
    Fault(
        "terminate a process",
        "all save the same step in 60 s (75), and start again",
        "running",
        signals.terminate_worker,
    ),
    Fault(
        "terminate the launcher",
        "all save the same step in 60 s, exit code 75",
        "running",
        signals.terminate_launcher,
    ),
    Fault(
        "full disk",
        "exit code 3 in 60 s, one line names the folder and the space",
        "running",
        disks.fill_disk,
        needs="small disk",
    ),
    Fault(
        "read-only disk",
        "exit code 3 in 60 s, one line names the folder",
        "running",
        disks.make_read_only,
        needs="mount",
    ),
    Fault(
        "flipped bit",
        "exit code 3 in 90 s, one line names leaf and device",
        "running",
        values.flip_bit,
    ),
    Fault(
        "mismatch",
        "exit code 2 before a step, one line names the field, no file changes",
        "resting",
        values.mismatch,
        min_processes=2,
    ),
    Fault(
        "shards",
        "exit code 2, one line names file and block",
        "resting",
        damage.damage_shards,
    ),
    Fault(
        "checkpoint",
        "set aside, named, never used",
        "resting",
        damage.damage_checkpoint,
    ),
    Fault(
        "compilation cache",
        "no other program runs, or exit code 2 and one line",
        "resting",
        damage.damage_programs,
    ),
    Fault(
        "metrics line",
        "kept aside, named, no other line lost",
        "resting",
        damage.damage_metrics,
    ),
    Fault(
        "torn metrics",
        "the torn line is cut, no other line lost",
        "resting",
        damage.tear_metrics,
    ),
    Fault(
        "samples line",
        "kept aside, named, no other line lost",
        "resting",
        damage.damage_samples,
    ),
    Fault(
        "goodput line",
        "left out, the account of the time goes on",
        "resting",
        damage.damage_goodput,
    ),
    Fault(
        "summary",
        "set aside, or exit code 2 and one line",
        "resting",
        damage.damage_summary,
    ),
    Fault(
        "hash cache",
        "read again, or exit code 2 and one line",
        "resting",
        damage.damage_hashes,
    ),
)
NAMES = tuple(fault.name for fault in FAULTS)
