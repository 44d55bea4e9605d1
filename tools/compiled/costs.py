"""Costs of a compiled step's instructions, as a profile for XLA's scheduler.

The scheduler puts other work between the start and the done of a collective by what it
believes that both cost. It reads costs from a file that
--xla_gpu_pgle_profile_file_or_directory_path names, as text if its suffix is .pbtxt. A
profile of a run on a GPU is meant; here they are estimates by stated rates.
"""

from tools.compiled.schedule import Schedule


def profile(schedule: Schedule) -> str:
    """Return the costs of all instructions of a schedule, by name, in microseconds, as
    the text of a ProfiledInstructionsProto (tsl/profiler/protobuf in XLA)."""
    lines = [
        f'costs {{ name: "{name}" cost_us: {1e6 * seconds:.4f} }}\n'
        for name, seconds in schedule.seconds.items()
        if seconds > 0
    ]
    return "".join(lines)
