"""Progress of loops."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator

import numpy as np
import pytest

import axon_nb
from axon_nb.cluster.output.lines import METER, METER_NAME
from axon_nb.errors import UsageError
from axon_nb.records.telemetry import set_cell_source
from axon_nb.records.training import job
from axon_nb.records.training.job import Bar, bars


@pytest.fixture(autouse=True)
def cell(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """No loop is known yet; the number of the cell that runs."""
    number = [1]
    set_cell_source(lambda: number[0])
    monkeypatch.setattr(job, "_loops", job._OpenLoops())
    yield number
    set_cell_source(lambda: None)


def seen() -> list[tuple[str, int, int, int | None, bool]]:
    """(name, depth, done, total, whether it is over) of each loop."""
    return [(bar.desc, bar.depth, bar.done, bar.total, bar.is_over) for bar in bars()]


def test_items_count_once_they_are_processed() -> None:
    during = []
    for item in axon_nb.progress([5, 6], desc="epochs"):
        for _ in axon_nb.progress((x for x in "abc"), desc="batches", total=3):
            pass
        during.append((item, seen()))
    assert during[1] == (6, [("epochs", 0, 1, 2, False), ("batches", 1, 3, 3, True)])
    assert seen() == [("epochs", 0, 2, 2, True), ("batches", 1, 3, 3, True)]


def test_loop_left_early_ends_at_that_item() -> None:
    for i in axon_nb.progress(range(10)):
        if i == 4:
            break
    assert seen() == [("", 0, 4, 10, True)]


def test_loops_of_earlier_cells_are_dropped(cell: list[int]) -> None:
    list(axon_nb.progress(range(2), desc="one"))
    cell[0] = 2
    list(axon_nb.progress(range(3), desc="two"))
    assert [bar.desc for bar in bars()] == ["two"]


def test_length_and_bad_input() -> None:
    assert len(axon_nb.progress([1, 2])) == 2
    with pytest.raises(TypeError, match="has no length"):
        len(axon_nb.progress(iter([1])))
    with pytest.raises(UsageError, match=r"progress\(int\): must be iterable"):
        axon_nb.progress(3)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match=r"total=2.5\): must be an integer >= 0"):
        axon_nb.progress([], total=2.5)  # type: ignore[arg-type]
    assert axon_nb.progress([], total=np.int64(3)).snapshot().total == 3


def test_lines_look_like_tqdm(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job, "_REDRAW_S", 0.0)
    for _ in axon_nb.progress(range(2), desc="epochs"):
        list(axon_nb.progress(range(3), desc="batches"))
    written = capsys.readouterr().err
    assert written.endswith("\n")
    written_rows = [row.rstrip() for row in written.replace("\n", "").split("\r") if row]
    assert all(METER.fullmatch(row) for row in written_rows), written_rows
    name = METER_NAME.match(written_rows[-1])
    assert name is not None
    assert name.groups() == ("epochs:", "2")
    assert any("batches 2/3" in row for row in written_rows)


def test_other_ranks_of_a_launcher_draw_nothing(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "3")
    list(axon_nb.progress(range(3)))
    assert capsys.readouterr().err == ""
    assert seen() == [("", 0, 3, 3, True)]


def test_bar_is_a_plain_record() -> None:
    assert Bar("x", 0, 1, None, 0.5, is_over=False).unit == "it"


def test_interrupt_on_loop_exit_prints_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    class Interrupted:
        def write(self, text: str) -> int:
            raise KeyboardInterrupt

        def flush(self) -> None: ...

    ignored: list[object] = []
    monkeypatch.setattr(sys, "unraisablehook", lambda found: ignored.append(found.exc_value))
    items = iter(axon_nb.progress(range(3), desc="left"))
    next(items)
    monkeypatch.setattr(sys, "stderr", Interrupted())
    del items
    gc.collect()
    assert ignored == []
    assert seen() == [("left", 0, 0, 3, True)]
