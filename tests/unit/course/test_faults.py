"""The cases of the bug hunt, and the points for solving them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import get_args

import pytest
import torch

from axon_course.board import read_board
from axon_course.faults import Fault, planted
from axon_course.faults.cases import CASES, LINES, Kind, draw
from axon_course.faults.verdicts import Verdict, judge
from axon_course.journal import Journal
from axon_nb.errors import UsageError
from scripts.build_course import SOURCES

TRUTH = Fault("skipped", 2, 5, "all_reduce")


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
