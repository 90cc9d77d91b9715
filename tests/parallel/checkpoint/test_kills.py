"""Ranks killed while saving: the last good checkpoint is complete, and they resume from it."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.parallel.checkpoint.killing import Round

ROOT = Path(__file__).resolve().parents[3]


def kill(folder: Path, rounds: int, seed: int) -> list[Round]:
    """Resume, save and be killed, repeatedly; the first round is not killed."""
    command = [sys.executable, "-m", "tests.parallel.checkpoint.killing", str(folder), str(rounds), str(seed)]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stderr
    return [Round(**json.loads(line)) for line in found.stdout.splitlines()]


@pytest.mark.timeout(900)
@pytest.mark.parametrize("rounds", [3, pytest.param(50, marks=pytest.mark.slow)])
def test_kill_during_save_never_leaves_a_bad_checkpoint(tmp_path: Path, rounds: int) -> None:
    reported = kill(tmp_path / "run", rounds, seed=rounds)
    assert len(reported) == rounds + 1
    assert [item.bad for item in reported] == [""] * len(reported)
    assert reported[0].resumed == -1
    assert reported[0].whole == 2
    # What was the latest is never lost: a run resumes from where the one before it came to, or from later.
    for before, after in itertools.pairwise(reported):
        assert after.resumed >= max(before.resumed, 3), reported
        assert after.whole in (2, 3)
    assert sum(bool(item.touch) for item in reported) >= rounds // 2
