"""Pictures below the check of a puzzle: what the learner's program did, up to its failure."""

from __future__ import annotations

import pytest

from axon_course.answers import unpack
from axon_course.checks import CheckResult, run_check
from axon_course.definitions import find_exercise
from axon_course.replays import Replay, replay_curve, replay_schedule
from axon_course.trials import Trial
from axon_nb.records.spans import Span
from scripts.build_course import SOURCES
from tests.unit.course.test_exercises import checked


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
