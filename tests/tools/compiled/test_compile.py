"""Test the notes on a compiled step."""

from tools.compiled.compile import NOT_COVERED, SORT, make_notes

CALL = 'custom-call(%q), custom_call_target="__cudnn$fmhaSoftmax"'


def test_notes_say_what_the_program_has_that_is_not_covered():
    assert make_notes("", "") == (NOT_COVERED,)
    (note,) = make_notes("", CALL)
    assert note == f"{NOT_COVERED}, the workspace of cuDNN's attention (counted as 0)"
    (note,) = make_notes(f"W0000 00:00:00.0 1 sort.cc:3] {SORT} for H100", "")
    assert note == f"{NOT_COVERED}, CUB's sort (another one is compiled)"


def test_a_line_of_the_log_is_said_once():
    line = "W0000 00:00:00.0 1 file.cc:3] spilled 4 bytes\n"
    silent = "E0000 00:00:00.0 1 slow_operation_alarm.cc:73] slow\n"
    log = line + silent + "no line of XLA's log\n" + line
    assert make_notes(log, "") == (NOT_COVERED, "XLA says (file.cc:3): spilled 4 bytes")
