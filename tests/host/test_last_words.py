"""What is told of a rank's end is what belongs to it, however long the end took."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from axon_nb.host.last_words import LastWords


def _write(path: Path, text: str, *, at: float) -> None:
    path.write_text(path.read_text() + text if path.exists() else text)
    os.utime(path, (at, at))


@pytest.mark.parametrize(
    ("crashed", "written", "told"),
    [
        (None, -600.0, {"words": "said", "crash": ""}),  # in the future: recent, however long this test takes
        (None, 60.0, {"words": "", "crash": ""}),
        (20.0, 20.5, {"words": "said", "crash": "Fatal"}),
        (20.0, 60.0, {"words": "", "crash": "Fatal"}),
    ],
)
def test_words_belong_to_an_end_that_they_were_written_before(
    tmp_path: Path, crashed: float | None, written: float, told: dict[str, str]
) -> None:
    log, words, now = tmp_path / "rank0.log", LastWords(), time.time()
    _write(log.with_suffix(".err"), "of the rank before", at=now)
    words.begin(0, log)
    _write(log.with_suffix(".err"), "said", at=now - written)
    if crashed is not None:
        _write(log.with_suffix(".crash"), "Fatal", at=now - crashed)
    assert words.of(0) == told
    assert words.of(1) == {}
