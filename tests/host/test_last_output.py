"""The last output reported for a dead rank is from before its death, however long dying took."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from axon_nb.host.children import LastOutput


def _write(path: Path, text: str, *, at: float) -> None:
    path.write_text(path.read_text() + text if path.exists() else text)
    os.utime(path, (at, at))


@pytest.mark.parametrize(
    ("crashed", "written", "expected"),
    [
        (None, -600.0, {"last_output": "said", "crash": ""}),  # in the future: recent, however long this test takes
        (None, 60.0, {"last_output": "", "crash": ""}),
        (20.0, 20.5, {"last_output": "said", "crash": "Fatal"}),
        (20.0, 60.0, {"last_output": "", "crash": "Fatal"}),
    ],
)
def test_only_recent_output_is_reported(
    tmp_path: Path, crashed: float | None, written: float, expected: dict[str, str]
) -> None:
    log, last, now = tmp_path / "rank0.log", LastOutput(), time.time()
    _write(log.with_suffix(".err"), "of the previous rank", at=now)
    last.rank_starting(0, log)
    _write(log.with_suffix(".err"), "said", at=now - written)
    if crashed is not None:
        _write(log.with_suffix(".crash"), "Fatal", at=now - crashed)
    assert last.of(0) == expected
    assert last.of(1) == {}
