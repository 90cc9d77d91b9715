"""Every check accepts its solution and refuses each wrong answer; the pictures below it; the cases of the bug hunt."""

from __future__ import annotations

import functools
import json
import re
from html import escape
from pathlib import Path
from typing import Any, get_args

import pytest
import torch

from axon_course.answers import unpack
from axon_course.board import read_board
from axon_course.checks import CheckResult, run_check
from axon_course.definitions import Exercise, all_exercises, find_exercise
from axon_course.faults import Fault, planted
from axon_course.faults.cases import CASES, LINES, Kind, draw
from axon_course.faults.verdicts import Verdict, judge
from axon_course.journal import Journal
from axon_course.replays import Replay, replay_curve, replay_schedule
from axon_course.trials import Trial
from axon_nb.errors import UsageError
from axon_nb.records.spans import Span
from axon_nb.widgets.html import prose
from scripts.build_course import SOURCES, stub

EXERCISES = {exercise.id: exercise for exercise in all_exercises()}
WRONG = sorted((SOURCES / "wrong").glob("*/*.py"))
REFUSED = "# refused: "

TRUTH = Fault("skipped", 2, 5, "all_reduce")


def exercise_of(path: Path) -> str:
    """The id of a file such as `2_2_off_by_one.py`."""
    return ".".join(path.stem.split("_")[:2])


def checked(exercise: Exercise, source: str, seed: int = 7) -> CheckResult:
    """The result of a check of a cell's source."""
    names: dict[str, Any] = {"__name__": "__main__"}
    lines = [line for line in source.splitlines() if not line.startswith(("%", "check("))]
    exec(compile("\n".join(lines), f"<{exercise.id}>", "exec", dont_inherit=True), names)
    return run_check(exercise, names.get(exercise.answer), seed=seed)


@functools.cache
def refused(path: Path) -> CheckResult:
    """The result of the check of a wrong answer."""
    return checked(find_exercise(exercise_of(path)), path.read_text(encoding="utf-8"))


def source_of(exercise_id: str) -> str:
    """The cell of an exercise with its markers, without the comments that make it py:percent."""
    marker = f"### BEGIN SOLUTION {exercise_id}\n"
    (cell,) = [
        cell
        for path in SOURCES.glob("[0-9]*.py")
        for cell in path.read_text(encoding="utf-8").split("\n# %%")
        if marker in cell
    ]
    return cell.partition("\n")[2].replace("# %%distributed", "%%distributed")


@pytest.mark.parametrize("exercise_id", EXERCISES)
@pytest.mark.parametrize("seed", [0, 1])
def test_solution_passes(exercise_id: str, seed: int) -> None:
    result = checked(EXERCISES[exercise_id], unpack(exercise_id), seed)
    assert result.passed, repr(result)
    assert (result.replay is not None) == (EXERCISES[exercise_id].score is not None)


@pytest.mark.parametrize("path", WRONG, ids=lambda path: path.stem)
def test_wrong_answer_is_refused_with_its_sentence(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert text.startswith(REFUSED)
    result = refused(path)
    assert not result.passed
    assert not result.not_yet
    assert text.splitlines()[0].removeprefix(REFUSED) in repr(result)
    page, said = result._repr_html_(), next(line.sentence for line in result.lines if line.sentence)
    assert page.index(prose(result.mistake)) < page.index(escape(said)), "the sentence that helps comes first"
    assert not re.search(r"\[(?:-?\d*\.\d+, ){3}", said), "of a tensor at most three numbers"


@pytest.mark.parametrize("exercise_id", EXERCISES)
def test_untouched_stub_is_not_yet_an_answer(exercise_id: str) -> None:
    exercise = EXERCISES[exercise_id]
    result = checked(exercise, stub(source_of(exercise_id)))
    assert result.not_yet
    assert not result.passed
    assert "Not yet" in repr(result)
    assert all(line.state == "open" for line in result.lines)


@pytest.mark.parametrize("exercise_id", EXERCISES)
def test_exercise_is_complete(exercise_id: str) -> None:
    exercise = EXERCISES[exercise_id]
    assert len([path for path in WRONG if exercise_of(path) == exercise_id]) >= 3
    assert len(exercise.properties) >= 2
    assert all(len(hint) > 20 for hint in exercise.hints)
    assert len({entry.name for entry in exercise.properties}) == len(exercise.properties)


def test_known_mistakes_are_recognized_in_a_wrong_answer() -> None:
    seen = {refused(path).mistake for path in WRONG}
    unseen = [
        mistake.sentence
        for exercise in EXERCISES.values()
        for mistake in exercise.mistakes
        if mistake.sentence not in seen
    ]
    assert not unseen, "no file in course/wrong makes these mistakes"


def replay_of(exercise_id: str, wrong: str = "") -> Replay:
    """The replay of a check of a solution, or of a file in `course/wrong`."""
    path = SOURCES / "wrong" / exercise_id.partition(".")[0].zfill(2) / f"{exercise_id.replace('.', '_')}_{wrong}.py"
    result = checked(find_exercise(exercise_id), path.read_text() if wrong else unpack(exercise_id))
    assert result.replay is not None
    assert repr(result.replay) in repr(result)
    assert result.replay._repr_html_() in result._repr_html_()
    return result.replay


def rows(replay: Replay) -> list[str]:
    """What stands beside each rank."""
    return [line.split("  ")[-1] for line in replay.text.splitlines() if line.startswith("  rank ")]


def test_calls_are_shown_in_order_with_their_bytes() -> None:
    replay = replay_of("11.2")
    assert rows(replay) == ["all_reduce 40 B, all_reduce 40 B, all_reduce 40 B"] * 4
    assert replay.html.count("all_reduce 40 B") == 12


def test_deadlock_shows_calls_up_to_it() -> None:
    counts = [row.count("all_reduce") for row in rows(replay_of("11.2", "leaves_alone"))]
    assert counts[1] == min(counts)
    assert counts[0] == counts[1] + 1  # the others wait in a call that rank 1 never makes


def test_schedule_of_a_wrong_answer_shows_who_waits() -> None:
    shown = rows(replay_of("8.3", "even"))
    assert shown[0].count("·") > 20
    assert replay_of("8.3").text != replay_of("8.3", "even").text


def test_answer_that_is_malformed_has_no_replay() -> None:
    for answer in ("all", [1, 2], 7):
        result = run_check(find_exercise("8.3"), answer, seed=0)
        assert not result.passed
        assert result.replay is None


def test_untouched_answer_has_no_replay() -> None:
    result: CheckResult = run_check(find_exercise("8.3"), ..., seed=0)
    assert result.not_yet
    assert result.replay is None


@pytest.mark.parametrize("values", [[0.0, 0.0], [1.0, 3.0, 2.0], [float(number) for number in range(1000)]])
def test_curve_fits_its_width(values: list[float]) -> None:
    replay = replay_curve("a curve", values, unit="MiB", start="first", end="last")
    assert len(replay.text.splitlines()[0]) <= 2 + 64
    assert f"at most {max(values):.3g} MiB" in replay.text


def test_schedule_says_how_long_ranks_wait() -> None:
    spans = [Span(0, "forward", "F", 0, 30, microbatch=0), Span(1, "forward", "F", 30, 40, microbatch=0)]
    replay = replay_schedule("two ranks", spans)
    assert rows(replay) == ["█" * 48 + "·" * 16, "·" * 48 + "█" * 16]
    assert "waiting, 50.0% of the time" in replay.text
    assert "backward" not in replay.text


def test_pictures_need_no_script_and_no_page() -> None:
    for exercise_id in ("6.4", "7.3", "8.3"):
        html = replay_of(exercise_id)._repr_html_()
        assert "<script" not in html
        assert "http" not in html.replace("data:image/svg+xml", "")


def test_calls_of_a_trial_name_their_ranks() -> None:
    trial = Trial(None, ranks=2, seed=0)
    log = trial.calls_of(_send_one)
    assert [(rank, call.operation, call.peer, call.bytes) for rank, call in log] == [
        (0, "send", 1, 8),
        (1, "recv", 0, 8),
    ]


def _send_one(_: object) -> None:
    import torch
    import torch.distributed as dist

    number = torch.zeros(1, dtype=torch.float64)
    if dist.get_rank() == 0:
        dist.send(number, 1)
    else:
        dist.recv(number, 0)


def accuse(journal: Journal, *, rank: int = 2, line: int = LINES["all_reduce"], kind: str = "skipped") -> Verdict:
    """An answer to case 4, which is `TRUTH`."""
    return judge(journal, 4, TRUTH, rank=rank, line=line, kind=kind)


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_ten_cases_are_the_ten_kinds_in_an_order_of_the_seed(ranks: int) -> None:
    orders = []
    for seed in range(20):
        faults = [draw(case, seed=seed, ranks=ranks) for case in CASES]
        assert faults == [draw(case, seed=seed, ranks=ranks) for case in CASES]
        assert {fault.kind for fault in faults} == set(get_args(Kind))
        assert all(0 <= fault.rank < ranks for fault in faults)
        assert [faults[5].kind, faults[6].kind] == ["killed", "endless"]
        assert ranks == 1 or faults[5].rank > 0  # rank 0 lends its variables
        orders.append(tuple(faults))
    assert len(set(orders)) > 10


def test_lines_are_those_of_the_program_in_the_notebook() -> None:
    (cell,) = [
        cell
        for cell in (SOURCES / "11_bug_hunt.py").read_text(encoding="utf-8").split("\n# %%\n")
        if "\ndef train(" in cell
    ]
    lines = cell.splitlines()
    assert lines[0] == "# %%distributed"
    marks = {"forward": "network(x[", "all_reduce": "dist.all_reduce(", "optimizer": "optimizer.step()"}
    for place, line in LINES.items():
        assert marks.get(place, f"dist.{place}(") in lines[line - 1]


def test_points_of_a_case_fall_with_wrong_answers(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "course.json")
    wrong = accuse(journal, rank=1, kind="swapped")
    assert wrong.right == {"rank": False, "line": True, "kind": False}
    assert not wrong.solved
    assert "clue(4)" in repr(wrong)
    solved = accuse(journal)
    assert solved.solved
    assert solved.points == solved.total == 8
    assert "8 of 10 points" in repr(solved)
    accuse(journal, rank=3)
    assert accuse(journal).points == 8  # a solved case stays as it is


def test_clue_costs_points(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "course.json")
    journal.update("case 4", {"clues": 1})
    assert accuse(journal).points == 7


def test_unfinished_answer_costs_nothing(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "course.json")
    verdict = judge(journal, 4, TRUTH, rank=2, line=..., kind="skipped")
    assert verdict.right["line"] is None
    assert "in place of each `...`" in verdict._repr_html_()
    assert accuse(journal).points == 10


def test_class_learns_which_cases_are_solved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AXON_NB_CLASS_DIR", str(tmp_path))
    journal = Journal(tmp_path / "course.json")
    judge(journal, 4, TRUTH, rank=2, line=..., kind="skipped")  # not an answer yet
    accuse(journal, rank=0, kind="raised")
    accuse(journal)
    accuse(journal, rank=1)  # solved already
    (path,) = tmp_path.glob("*.jsonl")
    events = [json.loads(line) for line in path.read_text().splitlines()]
    assert [(event["exercise"], event["attempt"], event["passed"], event["mistake"]) for event in events] == [
        ("case 4", 1, False, "Not right: rank, kind."),
        ("case 4", 2, True, ""),
    ]
    assert read_board(tmp_path).state(journal.nickname, "case 4") == "done"


def test_unknown_kinds_and_cases_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="kind must be one of skipped, swapped"):
        accuse(Journal(tmp_path / "course.json"), kind="hangs")
    with pytest.raises(UsageError, match="cases: 1 to 10"):
        draw(11, seed=0, ranks=4)
    with pytest.raises(UsageError, match="'stale' can be planted at optimizer"):
        Fault("stale", 0, 5, "all_reduce")


def test_nothing_is_planted_in_the_notebook_itself() -> None:
    model = torch.nn.Linear(1, 1)
    with (
        pytest.raises(UsageError, match="begins with %%distributed"),
        planted(Fault("endless", 0, 0, "forward"), model, torch.optim.SGD(model.parameters())),
    ):
        model(torch.ones(1))
