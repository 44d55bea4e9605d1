"""Profile the steps of a window: `10:13` traces steps 10, 11 and 12 of a run.

<folder>/step-10-13/[process-0/]
  perfetto_trace.json.gz          for ui.perfetto.dev and tools/read_profile.py
  op_names.json.gz                from each compiled op to the functions of moejax
                                  that it was traced in
  plugins/profile/<time>/*.xplane.pb   for xprof

jax is imported when a window opens, not with this module.
"""

import gzip
import json
import os
import pathlib
import re
from collections.abc import Callable
from typing import Any

from train.launch.program import say_loudly
from train.messages import one_line

HELP = (
    "A:B traces steps A to B - 1; the first step of a run is 1, and 10:13 is three "
    "steps. Leave out the first two, which warm up. The trace goes to RUN_DIR/profile"
)
STEPS = re.compile(r"(\d{1,9}):(\d{1,9})", re.ASCII)
OP_NAME = re.compile(
    r'^\s*(?:ROOT )?%?([\w.-]+) = .*?\bop_name="([^"]*)"', re.MULTILINE
)


def parse_steps(text: str) -> range:
    """Return range(10, 13) for '10:13', and an empty one for ''. Raises ValueError."""
    if not text:
        return range(0)
    match = STEPS.fullmatch(text.strip())
    steps = range(int(match[1]), int(match[2])) if match else range(0)
    if not steps or steps.start < 1:
        raise ValueError(
            f"--profile_steps={text} must be A:B with 1 <= A < B: 10:13 traces steps "
            "10, 11 and 12"
        )
    return steps


class Window:
    """A context around the training loop that traces the steps of a window.

    The loop calls `before` and `after` around each step that it dispatches. `after`
    waits for the devices at both edges of the window, so that the trace holds whole
    steps and no other ones. A trace that cannot be written costs a message, and the run
    goes on.
    """

    def __init__(
        self,
        folder: str | os.PathLike,
        steps: range,
        say: Callable[[str], None] = say_loudly,
        *,
        hlo_text: Callable[[], str] | None = None,
    ) -> None:
        """Prepare to trace `steps` into `folder`; without steps nothing is done.

        `hlo_text` is `as_text` of the compiled step. It is called once, when the trace
        ends.
        """
        self._folder = pathlib.Path(os.path.abspath(folder))
        self._steps, self._say, self._hlo_text = steps, say, hlo_text
        self._annotation = None
        self._traced: list[int] = []
        """Steps that the trace holds, which is open if there are any."""
        self._is_over = not steps

    def __enter__(self) -> "Window":
        return self

    def __exit__(self, *_) -> None:
        """Keep what has been traced when a run ends within the window."""
        if self._traced and not self._is_over:
            self._stop()
        elif not self._is_over:
            self._say(f"no profile: the run ended before step {self._steps.start}")

    def is_edge(self, step: int) -> bool:
        """Return whether `after` waits for this step, and may take seconds."""
        if self._is_over:
            return False
        is_last = bool(self._traced) and step + 1 == self._steps.stop
        return is_last or step + 1 == self._steps.start

    def before(self, step: int) -> None:
        """Open the trace at the first step of the window that this process runs."""
        if not self._is_over and step >= self._steps.stop:
            self._say(
                f"no profile: steps {self._steps.start}:{self._steps.stop} lie before "
                f"step {step}, where this run goes on"
            )
            self._is_over = True
        if self._is_over or step not in self._steps:
            return
        import jax

        if not self._traced:
            self._start()
        if not self._is_over:
            mark = jax.profiler.StepTraceAnnotation("train_step", step_num=step)
            self._annotation = mark
            self._annotation.__enter__()
            self._traced.append(step)

    def after(self, step: int, outputs: Any) -> None:
        """Wait for a step at an edge of the window, and end the trace after its last
        step. `outputs` are the arrays of the step that was dispatched."""
        self._end_annotation()
        if self.is_edge(step):
            import jax

            jax.block_until_ready(outputs)
            if self._traced:
                self._stop()

    def _start(self) -> None:
        """Begin the trace."""
        import jax

        self._folder /= f"step-{self._steps.start}-{self._steps.stop}"
        if jax.process_count() > 1:
            self._folder /= f"process-{jax.process_index()}"
        options = jax.profiler.ProfileOptions()
        options.python_tracer_level = 0  # Python's own calls would bury the rest
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            jax.profiler.start_trace(
                self._folder, create_perfetto_trace=True, profiler_options=options
            )
        except (OSError, RuntimeError) as fault:
            self._fail(fault)

    def _stop(self) -> None:
        """End the trace, write its files and say where they are."""
        import jax

        self._end_annotation()
        self._is_over = True
        try:
            jax.profiler.stop_trace()
            *_, newest = sorted(
                self._folder.glob("plugins/profile/*"), key=os.path.getmtime
            )
            name = "perfetto_trace.json.gz"  # to the top; jax's second copy goes
            (newest / name).replace(self._folder / name)
            for copy in newest.glob("*.trace.json.gz"):
                copy.unlink()
            if self._hlo_text is not None:
                text = json.dumps(op_names(self._hlo_text()))
                path = self._folder / "op_names.json.gz"
                path.write_bytes(gzip.compress(text.encode(), mtime=0))
        except (OSError, RuntimeError, ValueError) as fault:
            self._fail(fault)
            return
        first, last = self._traced[0], self._traced[-1]
        self._say(
            f"profile of steps {first} to {last}: {self._folder} "
            "(python tools/read_profile.py prints what is in it)"
        )

    def _end_annotation(self) -> None:
        """End the mark of a step in the trace, if one is open."""
        if self._annotation is not None:
            self._annotation.__exit__(None, None, None)
            self._annotation = None

    def _fail(self, fault: Exception) -> None:
        """Give up the trace, and say so."""
        self._is_over = True
        self._say(
            f"NO PROFILE of steps {self._steps.start}:{self._steps.stop}: "
            f"{one_line(fault)}; training goes on"
        )


def op_names(hlo_text: str) -> dict[str, str]:
    """Return, for each op of a compiled program, the names of the functions around it.

    'all-to-all.7' -> 'jit(_train_step)/jvp()/while/body/shard_map/dispatch/all_to_all'
    """
    return dict(OP_NAME.findall(hlo_text))
