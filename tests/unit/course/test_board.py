"""`axon-nb class`: the board of a class, from the lines that learners' checks have written."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path
from typing import Any

import pytest

from axon_nb.cli import main

SENTENCE = "This is the mean of the ranks' means."


def write(folder: Path, learner: str, *events: dict[str, Any]) -> None:
    """Append a learner's events as their journal does."""
    with (folder / f"{learner}.jsonl").open("a") as file:
        file.writelines(json.dumps({"time": time.time(), "learner": learner, **event}) + "\n" for event in events)


def checked(exercise: str, attempt: int, *, passed: bool = False, mistake: str = "") -> dict[str, Any]:
    """The event of a check."""
    return {"exercise": exercise, "attempt": attempt, "passed": passed, "mistake": mistake}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A class of three: one has done 1.1 at the second attempt, two have made the same mistake, one has guessed."""
    write(tmp_path, "otter-41", checked("1.1", 1, mistake=SENTENCE), checked("1.1", 2, passed=True))
    write(tmp_path, "yak-7", checked("1.1", 1, mistake=SENTENCE), checked("10.2", 1))
    write(tmp_path, "<b>", {"question": "1.a", "predicted": {"lines": 8}})
    write(tmp_path, "yak-7", {"question": "1.a", "predicted": {"lines": 4}})
    return tmp_path


def test_board_shows_who_has_done_what(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["class", str(folder)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("3 learners, 2 exercises; last entry 0 min ago.")
    assert lines[2].split() == ["1.1", "10.2"]
    assert lines[3].split() == ["otter-41", "●", "·"]
    assert lines[4].split() == ["yak-7", "◐", "◐"]
    assert "1.1 done by 1 of 2" in lines
    assert f"  2 × {SENTENCE}" in lines
    assert lines[lines.index("guess 1.a lines") + 1 :] == [f"  {4:>8} █ 1", f"  {8:>8} █ 1"]


def test_cases_of_the_bug_hunt_stand_behind_its_exercises(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(folder, "yak-7", checked("12.1", 1), checked("11.4", 1, passed=True), checked("case 10", 1, passed=True))
    write(folder, "yak-7", checked("case 9", 1, mistake="Not right: line."), checked("case 9", 2, passed=True))
    assert main(["class", str(folder)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("3 learners, 4 exercises, 2 cases; ")
    assert re.split(" {2,}", lines[2].strip()) == ["1.1", "10.2", "11.4", "case 9", "case 10", "12.1"]
    assert lines[4].split() == ["yak-7", "◐", "◐", "●", "●", "●", "◐"]
    assert len(lines[2]) == len(lines[3]) == len(lines[4])
    assert lines[lines.index("case 9 done by 1 of 2") + 1] == "  1 × Not right: line."


def test_page_shows_names_as_text(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(folder, "<b>", checked("1.1", 1))
    page = folder / "board.html"
    assert main(["class", str(folder), "--html", str(page)]) == 0
    assert str(page) in capsys.readouterr().out
    text = page.read_text()
    assert "&lt;b&gt;" in text
    assert "<b>" not in text
    assert 'class="done"' in text


def test_damaged_lines_are_counted_and_the_rest_is_shown(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "broken.jsonl").write_text('{"learner": "x"}\nnot JSON\n[]\n')
    (folder / "binary.jsonl").write_bytes(b"\xff\xfe")
    assert main(["class", str(folder)]) == 0
    assert "3 learners, 2 exercises; last entry 0 min ago. 4 lines are unreadable." in capsys.readouterr().out


def test_empty_and_missing_folders_are_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["class", str(tmp_path)]) == 0
    assert capsys.readouterr().out == "Nobody has checked anything yet.\n"
    assert main(["class", str(tmp_path / "none")]) == 1
    assert "AXON_NB_CLASS_DIR" in capsys.readouterr().err
