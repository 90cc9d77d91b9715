"""Faults that the course plants on ranks: each ends as its report says, and the next cell works."""

from __future__ import annotations

import re

import pytest

from axon_course.faults.cases import LINES, Fault, Kind, Place
from scripts.build_course import SOURCES
from tests.support.script import Script

SOURCE = (SOURCES / "11_bug_hunt.py").read_text(encoding="utf-8")
PROGRAM = next(cell for cell in SOURCE.split("\n# %%\n") if "\ndef train(" in cell)
PROGRAM = PROGRAM.partition("# %% [markdown]")[0].replace("%%distributed", "line 1")
SAME = "bool((parameters_to_vector(network.parameters()) == undisturbed).all())"


@pytest.fixture
def course_script(script: Script) -> Script:
    """The shared script, whose ranks know the program of the bug hunt."""
    script.ok(f"c.run({PROGRAM!r}, quiet=True)")
    return script


def train(script: Script, fault: Fault) -> str:
    """The error of a training with a fault; empty if there was none."""
    text = f"network = train(Fault({fault.kind!r}, {fault.rank}, {fault.step}, {fault.place!r}))"
    return script.run(f"c.run({text!r}, quiet=True)").message


def values(script: Script, code: str) -> dict[int, object]:
    """What a cell returns on each rank."""
    result: dict[int, object] = script.ok(f"c.run({code!r}, quiet=True).values").value
    return result


@pytest.mark.parametrize(
    ("kind", "place", "says"),
    [
        ("skipped", "all_reduce", "all_gather"),
        ("skipped", "all_gather", "all_reduce"),
        ("swapped", "all_reduce", "barrier"),
        ("swapped", "all_gather", "barrier"),
        ("raised", "forward", r"rank 1\b(?s:.*)ValueError: this sample cannot be read"),
        ("raised", "all_gather", r"rank 1\b(?s:.*)ValueError: this sample cannot be read"),
        ("shape", "all_reduce", r"rank 1\b"),
        ("dtype", "all_reduce", r"rank 1\b"),
    ],
)
def test_fault_is_reported_and_gone_in_the_next_cell(
    course_script: Script, kind: Kind, place: Place, says: str
) -> None:
    message = train(course_script, Fault(kind, 1, 5, place))
    assert re.search(says, message), message
    if kind != "raised":  # its line is in the traceback
        assert f"line {LINES[place]}" in message, message
    assert values(course_script, f"network = train()\n{SAME}") == {0: True, 1: True}


def test_stale_rank_differs_in_silence(course_script: Script) -> None:
    assert not train(course_script, Fault("stale", 1, 5, "optimizer"))
    kept = "bool((parameters_to_vector(network.parameters()) == snapshots[5]).all())"
    assert values(course_script, kept) == {0: False, 1: True}


def test_leak_lives_as_long_as_the_model(course_script: Script) -> None:
    assert not train(course_script, Fault("leak", 1, 5, "forward"))
    assert values(course_script, "sum(kept.nbytes for kept in vars(network).get('kept', []))") == {0: 0, 1: 7 << 23}
    assert values(course_script, f"network = train()\n{SAME}, 'kept' in vars(network)") == dict.fromkeys(
        (0, 1), (True, False)
    )


def test_slow_rank_changes_nothing_else(course_script: Script) -> None:
    assert not train(course_script, Fault("slow", 1, 10, "forward"))
    assert values(course_script, SAME) == {0: True, 1: True}


def test_endless_rank_can_be_interrupted(course_script: Script) -> None:
    code = "train(Fault('endless', 1, 5, 'all_reduce'))"
    answer = course_script.run(f"c.run({code!r}, quiet=True, timeout=3)")
    assert "CellTimeoutError" in answer.kinds
    assert values(course_script, f"network = train()\n{SAME}") == {0: True, 1: True}


def test_killed_rank_is_replaced_and_training_goes_on(course_script: Script) -> None:
    message = train(course_script, Fault("killed", 1, 5, "all_reduce"))
    assert "rank 1 was killed by SIGKILL" in message
    course_script.ok("c.repair(from_rank=0)")
    code = f"step = max(snapshots)\nnetwork = train(None, step, snapshots[step])\nstep, {SAME}"
    assert values(course_script, code) == {0: (5, True), 1: (5, True)}
