"""What a notebook of the course calls, what is kept of it, and the board of a class."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from datetime import date
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from axon_course import check, hint, measured, predict, progress, solution
from axon_course.answers import locked_until
from axon_course.journal import Journal
from axon_nb.cli import main
from axon_nb.errors import UsageError

SENTENCE = "This is the mean of the ranks' means."


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder in which the learner works; what is kept goes below it."""
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    monkeypatch.delenv("AXON_NB_CLASS_DIR", raising=False)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def answer(monkeypatch: pytest.MonkeyPatch, function: Any) -> None:
    """Bind an answer to 1.1 as a cell does."""
    monkeypatch.setitem(globals(), "mean_loss", function)


def own_mean(losses: torch.Tensor) -> float:
    """A wrong answer to 1.1."""
    return losses.mean().item()


def right_mean(losses: torch.Tensor) -> float:
    """An answer to 1.1."""
    parts = torch.tensor([losses.sum().item(), len(losses)])
    dist.all_reduce(parts)
    return (parts[0] / parts[1]).item()


@pytest.mark.usefixtures("folder")
def test_check_finds_the_answer_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    result = check("1.1")
    assert result.not_yet == "run the cell that defines mean_loss"
    answer(monkeypatch, right_mean)
    assert check("1.1").passed


@pytest.mark.usefixtures("folder")
def test_result_shows_a_line_per_property(monkeypatch: pytest.MonkeyPatch) -> None:
    answer(monkeypatch, own_mean)
    result = check("1.1")
    text, page = repr(result), result._repr_html_()
    for line in result.lines:
        assert line.name in text
        assert line.name in page
    assert "✗ ranks with equally many samples" in text
    assert "· ranks with 3 and 5 samples" in text
    assert "each rank's own mean" in text
    assert "each rank&#x27;s own mean" in page
    assert "<script" not in page
    assert ">hint(&quot;1.1&quot;)</code>" in page


@pytest.mark.usefixtures("folder")
def test_error_in_an_answer_names_its_rank_and_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def late(losses: torch.Tensor) -> float:
        if dist.get_rank() == 2:
            return list(losses)[5].item()
        return losses.mean().item()

    answer(monkeypatch, late)
    assert "rank 2 raised IndexError in line 3 of mean_loss: list index out of range" in repr(check("1.1"))


@pytest.mark.usefixtures("folder")
def test_name_that_only_cells_have_is_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    answer(monkeypatch, lambda losses: losses.sum().item() / world_size)  # type: ignore[name-defined]  # noqa: F821
    assert "`dist.get_world_size()` says it everywhere" in repr(check("1.1"))


@pytest.mark.usefixtures("folder")
def test_error_in_a_class_names_its_method_and_line(monkeypatch: pytest.MonkeyPatch) -> None:
    class Subscripts:
        def __init__(self, parameters: Any, lr: float) -> None:
            self.mine = parameters[0]

    monkeypatch.setitem(globals(), "ZeroAdam", Subscripts)
    assert "raised TypeError in line 2 of ZeroAdam.__init__: " in repr(check("5.1"))


@pytest.mark.usefixtures("folder")
def test_answer_that_waits_for_ever_is_refused_with_who_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    def forgetful(losses: torch.Tensor) -> float:
        if dist.get_rank() == 0:
            dist.barrier()
        return 0.0

    answer(monkeypatch, forgetful)
    assert "rank 0 is waiting in barrier for ranks 1-3" in repr(check("1.1"))


@pytest.mark.usefixtures("folder")
def test_cases_depend_on_the_seed_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    answer(monkeypatch, own_mean)
    assert repr(check("1.1")) == repr(check("1.1"))


@pytest.mark.usefixtures("folder")
def test_hints_come_one_by_one() -> None:
    counts = [
        len([line for line in repr(hint("1.1")).splitlines() if line[0].isdigit() and line[1] == "."]) for _ in "1234"
    ]
    assert counts == [1, 2, 3, 3]
    assert 'solution("1.1")' in repr(hint("1.1"))


@pytest.mark.usefixtures("folder")
def test_solution_needs_an_attempt_or_force(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match=r"Try 1.1 first"):
        solution("1.1")
    assert "def mean_loss" in repr(solution("1.1", force=True))
    answer(monkeypatch, own_mean)
    check("1.1")
    assert "def mean_loss" in repr(solution("1.1"))


@pytest.mark.usefixtures("folder")
def test_teacher_locks_solutions_until_a_date(folder: Path) -> None:
    (folder / "course.toml").write_text('[locked_until]\nall = 2026-01-01\n"1.2" = 9999-12-31\n')
    assert locked_until("1.1") is None
    assert locked_until("1.1", date(2025, 12, 31)) == date(2026, 1, 1)
    with pytest.raises(UsageError, match=r"1.2 is locked until 31 December 9999"):
        solution("1.2", force=True)


@pytest.mark.usefixtures("folder")
def test_unreadable_lock_is_refused_with_its_file(folder: Path) -> None:
    (folder / "course.toml").write_text("[locked")
    with pytest.raises(UsageError, match=r"course.toml cannot be read"):
        solution("1.1", force=True)


@pytest.mark.usefixtures("folder")
def test_progress_counts_what_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    assert repr(progress()).startswith("0 of ")
    answer(monkeypatch, right_mean)
    check("1.1")
    answer(monkeypatch, own_mean)
    check("1.1")
    assert repr(progress()).startswith("1 of ")
    assert "1 ●○○" in repr(progress())
    heights = re.findall(r'src="data:image/svg\+xml;base64,[^"]+" height="(\d+)"', progress()._repr_html_())
    assert set(heights) == {"16"}, "as high as it is drawn, and no number is within it"


@pytest.mark.usefixtures("folder")
def test_guess_is_drawn_beside_what_was_measured() -> None:
    assert "Type your guess in place of `...`: calls" in repr(predict("1.a", calls=...))
    assert "Kept" in repr(predict("1.a", calls=6))
    shown = measured("1.a", calls=3)
    assert "calls: 6, measured 3" in repr(shown)
    assert "width:220px" in shown._repr_html_()
    assert "width:110px" in shown._repr_html_()


@pytest.mark.usefixtures("folder")
def test_nothing_is_shared_unless_a_class_has_a_folder(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answer(monkeypatch, own_mean)
    check("1.1")
    assert [path.name for path in folder.iterdir()] == ["data"]
    shared = folder / "class"
    shared.mkdir()
    monkeypatch.setenv("AXON_NB_CLASS_DIR", str(shared))
    check("1.1")
    (file,) = shared.iterdir()
    (event,) = [json.loads(line) for line in file.read_text().splitlines()]
    assert event["learner"] == Journal().nickname == file.stem
    assert event["exercise"] == "1.1"
    assert event["attempt"] == 2
    assert "own mean" in event["mistake"]


@pytest.mark.usefixtures("folder")
def test_damaged_journal_is_read_as_empty(folder: Path) -> None:
    path = folder / "data" / "axon_nb" / "course.json"
    path.parent.mkdir(parents=True)
    path.write_text("[")
    assert repr(progress()).startswith("0 of ")
    predict("1.a", calls=6)
    assert Journal().entry("1.a") == {"predicted": {"calls": 6}}


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize("call", [check, hint, solution])
def test_unknown_exercise_is_refused_with_those_that_exist(call: Any) -> None:
    with pytest.raises(UsageError, match=r"no exercise '9.9'; exercises: 1.1, 1.2"):
        call("9.9")


@pytest.mark.usefixtures("folder")
def test_program_without_the_course_says_how_to_get_it() -> None:
    code = "import sys; sys.modules['axon_course'] = None; from axon_nb.cli import main; sys.exit(main(['course']))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode
    assert "pip install ./course" in done.stderr


def write(folder: Path, learner: str, *events: dict[str, Any]) -> None:
    """Append a learner's events as their journal does."""
    with (folder / f"{learner}.jsonl").open("a") as file:
        file.writelines(json.dumps({"time": time.time(), "learner": learner, **event}) + "\n" for event in events)


def checked(exercise: str, attempt: int, *, passed: bool = False, mistake: str = "") -> dict[str, Any]:
    """The event of a check."""
    return {"exercise": exercise, "attempt": attempt, "passed": passed, "mistake": mistake}


@pytest.fixture
def class_folder(tmp_path: Path) -> Path:
    """A class of three: one has done 1.1 at the second attempt, two have made the same mistake, one has guessed."""
    write(tmp_path, "otter-41", checked("1.1", 1, mistake=SENTENCE), checked("1.1", 2, passed=True))
    write(tmp_path, "yak-7", checked("1.1", 1, mistake=SENTENCE), checked("10.2", 1))
    write(tmp_path, "<b>", {"question": "1.a", "predicted": {"lines": 8}})
    write(tmp_path, "yak-7", {"question": "1.a", "predicted": {"lines": 4}})
    return tmp_path


def test_board_shows_who_has_done_what(class_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["class", str(class_folder)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("3 learners, 2 exercises; last entry 0 min ago.")
    assert lines[2].split() == ["1.1", "10.2"]
    assert lines[3].split() == ["otter-41", "●", "·"]
    assert lines[4].split() == ["yak-7", "◐", "◐"]
    assert "1.1 done by 1 of 2" in lines
    assert f"  2 × {SENTENCE}" in lines
    assert lines[lines.index("guess 1.a lines") + 1 :] == [f"  {4:>8} █ 1", f"  {8:>8} █ 1"]


def test_cases_of_the_bug_hunt_stand_behind_its_exercises(
    class_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(
        class_folder, "yak-7", checked("12.1", 1), checked("11.4", 1, passed=True), checked("case 10", 1, passed=True)
    )
    write(class_folder, "yak-7", checked("case 9", 1, mistake="Not right: line."), checked("case 9", 2, passed=True))
    assert main(["class", str(class_folder)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("3 learners, 4 exercises, 2 cases; ")
    assert re.split(" {2,}", lines[2].strip()) == ["1.1", "10.2", "11.4", "case 9", "case 10", "12.1"]
    assert lines[4].split() == ["yak-7", "◐", "◐", "●", "●", "●", "◐"]
    assert len(lines[2]) == len(lines[3]) == len(lines[4])
    assert lines[lines.index("case 9 done by 1 of 2") + 1] == "  1 × Not right: line."


def test_page_shows_names_as_text(class_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(class_folder, "<b>", checked("1.1", 1))
    page = class_folder / "board.html"
    assert main(["class", str(class_folder), "--html", str(page)]) == 0
    assert str(page) in capsys.readouterr().out
    text = page.read_text()
    assert "&lt;b&gt;" in text
    assert "<b>" not in text
    assert 'class="done"' in text


def test_damaged_lines_are_counted_and_the_rest_is_shown(
    class_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (class_folder / "broken.jsonl").write_text('{"learner": "x"}\nnot JSON\n[]\n')
    (class_folder / "binary.jsonl").write_bytes(b"\xff\xfe")
    assert main(["class", str(class_folder)]) == 0
    assert "3 learners, 2 exercises; last entry 0 min ago. 4 lines are unreadable." in capsys.readouterr().out


def test_empty_and_missing_folders_are_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["class", str(tmp_path)]) == 0
    assert capsys.readouterr().out == "Nobody has checked anything yet.\n"
    assert main(["class", str(tmp_path / "none")]) == 1
    assert "AXON_NB_CLASS_DIR" in capsys.readouterr().err
