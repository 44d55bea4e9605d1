"""Play one scenario: disturb a run by its faults, bring it to its end, and judge."""

import contextlib
import dataclasses
import random
import shutil
import time

from tools.faults.disks import mounts_below, small_disk
from tools.faults.fault import REFUSES_OR_GOES_ON, Damage, Fault
from tools.faults.plan import Scenario
from tools.faults.promises import (
    Result,
    expect_nothing_left,
    expect_same,
    expect_untouched,
    listing,
    read_result,
)
from tools.faults.run import PACE_SEC, START_SEC, Broken, Place, Run
from tools.faults.signals import TERM_SEC

SCENARIO_SEC = 420.0
"""Limit on one scenario. A run that hangs is killed then, and its promise is broken."""
MAX_STEPS_BETWEEN = 6
EARLY_SHARE, EARLY_SEC = 0.25, 5.0
"""Share of the faults that hit a run while it starts, if they may, and the time since
the start at which they hit at the latest."""


@dataclasses.dataclass
class Verdict:
    """Whether the promise of one fault was kept."""

    fault: Fault
    is_kept: bool | None = None
    """None if the fault was not reached, because an earlier promise was broken."""
    why: str = ""
    sec: float = 0.0
    """Time from the fault to the run's answer."""


def play(
    scenario: Scenario, place: Place, expected: Result, seed: int
) -> tuple[list[Verdict], str]:
    """Play a scenario in folders that are there and empty.

    Returns a verdict for each fault, and how the promises at the end were broken, ''
    if they were kept or not reached.
    """
    has_small_disk = any(fault.needs == "small disk" for fault in scenario.faults)
    with contextlib.ExitStack() as stack:
        if has_small_disk:
            stack.enter_context(small_disk(place.disk))
        run = Run(place, scenario.num_processes, SCENARIO_SEC, PACE_SEC)
        stack.callback(run.close)
        player = _Player(run, random.Random(f"{seed}/{scenario.number}"), scenario)
        why = _disturb_and_judge(player, place, expected)
        run.close()
        if has_small_disk and (why or not all(x.is_kept for x in player.verdicts)):
            shutil.copytree(place.disk, place.root / "kept")
    return player.verdicts, why


def _disturb_and_judge(player: "_Player", place: Place, expected: Result) -> str:
    """Bring a run through its faults to its end; return which promise of the end is
    broken, '' if none is or if the end was not reached."""
    num_mounts, before = len(mounts_below(place.root)), listing(place)
    names = {verdict.fault.name for verdict in player.verdicts}
    try:
        player.disturb()
        player.finish()
    except Broken as broken:
        player.write_stacks()
        return player.blame(str(broken))
    try:
        expect_same(read_result(place.run_dir), expected)
        may_leave_tmp = "kill the launcher" in names
        expect_nothing_left(place, num_mounts, may_leave_tmp=may_leave_tmp)
        expect_untouched(before, listing(place))
    except Broken as broken:
        return str(broken)
    return ""


class _Player:
    """The faults of a scenario on their way through a run."""

    def __init__(self, run: Run, rng: random.Random, scenario: Scenario) -> None:
        self._run, self._rng = run, rng
        self.verdicts = [Verdict(fault) for fault in scenario.faults]
        self._acting: Verdict | None = None
        """The fault that is hitting the run now."""
        self._open: list[Verdict] = []
        """Faults after which the run has not reached another step yet."""
        self._damage: list[tuple[Verdict, Damage]] = []

    def disturb(self) -> None:
        """Let all faults hit the run, each after some steps."""
        for verdict in self.verdicts:
            fault = verdict.fault
            if fault.state == "running":
                self._wait_for_moment(fault)
            else:
                self._rest()
            self._acting, start_sec = verdict, time.monotonic()
            damage = fault.act(self._run, self._rng)
            self._acting, verdict.sec = None, time.monotonic() - start_sec
            self._open.append(verdict)
            if damage is not None:
                self._damage.append((verdict, damage))

    def finish(self) -> None:
        """Let the run go on to its end."""
        self._go_on()
        self._run.expect_end(0, START_SEC)

    def write_stacks(self) -> None:
        self._run.write_stacks()

    def blame(self, why: str) -> str:
        """Note that the promise of the fault that is hitting the run is broken, or else
        those of all faults that the run has not gone on after.

        Return '', or `why` if there are none.
        """
        guilty = [self._acting] if self._acting else self._open
        for verdict in guilty:
            verdict.is_kept, verdict.why = False, why
        return "" if guilty else why

    def _wait_for_moment(self, fault: Fault) -> None:
        """Return at a random moment: after some steps, or while the run starts."""
        num_steps = self._rng.randint(1, MAX_STEPS_BETWEEN)
        early_sec = EARLY_SEC * self._rng.random()
        is_early = self._rng.random() < EARLY_SHARE
        if fault.may_be_early and is_early and not self._damage:
            if not self._run.is_live:
                self._run.start()
            time.sleep(early_sec)
            return
        self._go_on()
        self._run.wait_for_steps(num_steps)

    def _rest(self) -> None:
        """Stop the run after a step, if it is not resting on two checkpoints. With none
        the next start would begin anew, and damage to most files would hit nothing."""
        run = self._run
        if run.is_live or len(run.saved_steps()) < 2:
            self._go_on()
            run.wait_for_steps(self._rng.randint(1, MAX_STEPS_BETWEEN))
            run.wait_until(
                lambda: len(run.saved_steps()) > 1 or not run.is_launcher_alive(),
                "two checkpoints",
                START_SEC,
            )
            run.stop(TERM_SEC)

    def _go_on(self) -> None:
        """Bring the run to its next step, started again where it refuses damaged files.
        After that the promises of all faults so far are kept."""
        text = ""
        while True:
            if not self._run.is_live:
                self._run.start()
            has_begun = self._run.wait_for_begin()
            text += self._run.text()
            if has_begun:
                break
            self._heal_what_was_refused()
        self._run.expect_resumed()
        self._run.spoiled.clear()
        for verdict in self._open:
            verdict.is_kept = True
        for verdict, damage in self._damage:
            try:
                if "starting again" in text:
                    raise Broken("it crashed, and was started again")
                damage.check(text)
            except Broken as broken:
                verdict.is_kept, verdict.why = False, str(broken)
        self._open, self._damage = [], []

    def _heal_what_was_refused(self) -> None:
        """Heal the damage that the last start has refused, or raise Broken."""
        code, line = self._run.wait_for_end(TERM_SEC), self._run.error()
        for verdict, damage in self._damage:
            may_refuse = damage.answer == REFUSES_OR_GOES_ON
            if code == 2 and may_refuse and any(x in line for x in damage.named):
                damage.heal()
                self._damage.remove((verdict, damage))
                return
        raise Broken(f"ended with {code} before a step: {line[:300]}")
