"""Results and rich displays of ranks, and where they go: to a front end, or to a terminal."""

from __future__ import annotations

import io
import subprocess
import sys
from typing import Any

import pytest

from axon_nb.cluster.output import CellOutput, NotebookSink
from tests.support.cell_output import Bench

HTML = {"text/plain": "Figure", "text/html": "<b>x</b>"}

SCRIPT = """
import sys
from axon_nb.cluster.output import CellOutput, NotebookSink
output = CellOutput([0, 1], NotebookSink())
for rank in (0, 1):
    output.feed(rank, "stream", {"name": "stdout", "text": "hello\\n"}, {})
    output.feed(rank, "stream", {"name": "stderr", "text": "\\r1/2\\r2/2\\n"}, {})
    output.feed(rank, "execute_result", {"data": {"text/plain": "42"}, "metadata": {}}, {})
    shown = {"data": {"text/plain": "Figure", "text/html": "<b>x</b>"}, "transient": {"display_id": "f"}}
    output.feed(rank, "display_data", shown, {})
    output.feed(rank, "update_display_data", shown, {})
    output.feed(rank, "clear_output", {"wait": True}, {})
    output.feed(rank, "stream", {"name": "stdout", "text": "snow\\u2603\\n"}, {})
output.flush(final=True)
unwanted = {"IPython", "ipykernel", "ipyparallel", "torch", "ipywidgets"} & set(sys.modules)
assert not unwanted, unwanted
"""


def displays(bench: Bench) -> list[tuple[dict[str, Any], str | None, bool]]:
    return [payload for kind, payload in bench.sink.records if kind == "display"]


def test_identical_results_and_displays_are_shown_once() -> None:
    bench = Bench([0, 1])
    for rank in (0, 1):
        bench.show(rank, {"text/plain": "42"}, "execute_result")
        bench.show(rank, dict(HTML))
    bench.output.flush(final=True)
    assert bench.sink.records == [("stdout", "[ranks 0-1] 42\n[ranks 0-1]\n"), ("display", (HTML, None, False))]


def test_last_update_of_a_display_is_shown_where_displays_cannot_be_updated() -> None:
    bench = Bench([0, 1], in_place=False)
    for rank in (0, 1):
        bench.show(rank, {"text/plain": "start"}, display_id="a")
        bench.show(rank, dict(HTML), display_id="figure")
        for number in range(1000):
            bench.show(rank, {"text/plain": str(number + rank)}, "update_display_data", display_id="a")
            bench.pass_time(0.01)
        bench.show(rank, {"text/plain": "Chart"}, "update_display_data", display_id="figure")
        bench.print(rank, "end\n")
        bench.output.rank_done(rank)
        bench.pass_time(0.1)
    assert [line for line in bench.end() if line != "[rank 0]"] == [
        *("[rank 0] start", "Figure", "[rank 0] end", "[rank 0] 999", "[rank 0] Chart"),
        *("[rank 1] start", "[rank 1]", "Figure", "[rank 1] end", "[rank 1] 1000", "[rank 1] Chart"),
    ]
    assert not any(update for _, _, update in displays(bench))


def test_multiline_result_has_one_label() -> None:
    bench = Bench()
    for rank in range(4):
        bench.show(rank, {"text/plain": "tensor([[1, 2],\n        [3, 4]])"}, "execute_result")
    assert bench.end() == ["[ranks 0-3] tensor([[1, 2],", "                    [3, 4]])"]


def test_results_with_common_lines_are_not_merged() -> None:
    bench = Bench([0, 1])
    for rank in (0, 1):
        bench.show(rank, {"text/plain": f"Net(\n  {rank}\n)"}, "execute_result")
    assert bench.end() == [f"{' ' * 9 if i else f'[rank {r}] '}{t}" for r in (0, 1) for i, t in _lines(r)]


def _lines(rank: int) -> list[tuple[int, str]]:
    return [(0, "Net("), (1, f"  {rank}"), (2, ")")]


def test_result_with_colours_and_carriage_returns() -> None:
    bench = Bench([0])
    bench.show(0, {"text/plain": "\x1b[31ma\r\nb\x1b[2K"}, "execute_result")
    assert bench.end() == ["[rank 0] \x1b[31ma", "         b\x1b[0m"]


def test_result_of_100_000_lines_is_truncated() -> None:
    bench = Bench([0], limit_bytes=50_000)
    bench.show(0, {"text/plain": "\n".join(f"row {i}" for i in range(100_000))}, "execute_result")
    bench.output.flush(final=True)
    assert len(bench.sink.text("stdout") + bench.sink.text("stderr")) < 60_000
    assert "[rank 0] row 0\n" in bench.sink.text()
    assert "[rank 0] row 99999\n" in bench.sink.text()
    assert "not shown" in bench.sink.text("stderr")


def test_different_displays_are_labelled_in_order_with_text() -> None:
    bench = Bench([0, 1])
    for rank in (0, 1):
        bench.print(rank, f"before {rank}\n")
        bench.show(rank, {"text/html": f"<b>{rank}</b>", "text/plain": f"shown {rank}"})
        bench.print(rank, f"after {rank}\n")
    lines = bench.end()
    for rank in (0, 1):
        own = [f"[rank {rank}] before {rank}", f"shown {rank}", f"[rank {rank}] after {rank}"]
        assert [line for line in lines if line in own] == own
        assert lines[lines.index(f"shown {rank}") - 1] == f"[rank {rank}]"


def test_equal_displays_of_some_ranks_are_merged() -> None:
    bench = Bench([0, 1, 2])
    for rank in (0, 2):
        bench.show(rank, dict(HTML))
    bench.show(1, {"image/png": "abc"})
    bench.output.flush(final=True)
    assert len(displays(bench)) == 2
    assert set(bench.lines()) == {"[ranks 0,2]", "[rank 1]"}


def test_update_in_a_later_cell_reaches_the_display() -> None:
    first, second = Bench([0]), Bench([0])
    first.show(0, dict(HTML), display_id="plot")
    first.end()
    second.show(0, {"text/html": "new"}, "update_display_data", display_id="plot")
    second.end()
    assert displays(second) == [({"text/html": "new"}, displays(first)[0][1], True)]


def test_last_of_many_updates_is_shown() -> None:
    bench = Bench([0])
    bench.show(0, dict(HTML), display_id="plot")
    for step in range(5000):
        bench.show(0, {"text/html": f"{step}" * 100}, "update_display_data", display_id="plot")
        bench.pass_time(0.001)
    bench.output.flush(final=True)
    shown = displays(bench)
    assert shown[-1][0] == {"text/html": "4999" * 100}
    assert len(shown) < 100


def test_display_with_id_is_not_merged() -> None:
    bench = Bench([0, 1])
    for rank in (0, 1):
        bench.show(rank, {"text/plain": "status"}, display_id="s")
    assert bench.end() == ["[rank 0]", "status", "[rank 1]", "status"]


def test_10_000_displays_are_bounded() -> None:
    bench = Bench([0])
    for i in range(10_000):
        bench.show(0, {"text/html": f"<b>{i}</b>"})
        bench.pass_time(0.001)
    bench.output.flush(final=True)
    assert len(displays(bench)) <= 1000
    assert "9,000 displays" in bench.sink.text("stderr")


@pytest.mark.parametrize("wait", [True, False])
def test_clear_output(wait: bool) -> None:
    bench = Bench([0])
    for step in range(5):
        bench.clear(0, wait=wait)
        bench.print(0, f"step {step}\n")
        bench.pass_time(0.02)
    assert bench.end() == ["[rank 0] step 4"]


def test_clears_of_one_flush_are_merged() -> None:
    bench = Bench()
    for rank in range(4):
        bench.print(rank, f"before the steps of {rank}\n")
    bench.pass_time(1)
    for rank in range(4):
        for step in range(10):
            bench.clear(rank, wait=True)
            bench.print(rank, f"step {step} of {rank}\n")
    lines = bench.end()
    assert lines == [f"[rank {rank}] step 9 of {rank}" for rank in range(4)]
    assert [kind for kind, _ in bench.sink.records].count("clear") == 1


def test_deferred_clear_waits_for_the_next_output() -> None:
    bench = Bench([0])
    bench.print(0, "old\n")
    bench.clear(0, wait=True)
    bench.pass_time(1)
    assert bench.screen() == ["[rank 0] old"]
    bench.print(0, "new\n")
    bench.pass_time(1)
    assert bench.end() == ["[rank 0] new"]
    bench.clear(0, wait=True)
    assert bench.end() == ["[rank 0] new"]


def test_clear_keeps_simultaneous_lines_of_other_ranks() -> None:
    bench = Bench([0, 1])
    bench.print(0, "zero\n")
    bench.print(1, "one\n")
    bench.clear(0)
    assert bench.end() == ["[rank 1] one"]


def test_clear_keeps_earlier_output_of_other_ranks() -> None:
    bench = Bench([0, 1])
    bench.print(1, "one\n")
    bench.show(1, {"image/png": "one's figure"}, display_id="a")
    bench.pass_time(1)
    for step in range(3):
        bench.clear(0, wait=True)
        bench.print(0, f"zero at {step}\n")
        bench.pass_time(1)
    bench.show(1, {"image/png": "one's new figure"}, "update_display_data", display_id="a")
    bench.pass_time(1)
    bench.clear(0, wait=True)
    bench.print(0, "zero at last\n")
    bench.output.flush(final=True)
    after = bench.sink.records[max(i for i, (kind, _) in enumerate(bench.sink.records) if kind == "clear") + 1 :]
    text = "".join(text for kind, text in after if kind == "stdout")
    assert text.splitlines() == ["[rank 1] one", "[rank 1]", "[rank 0] zero at last"]
    assert [payload[0] for kind, payload in after if kind == "display"] == [{"image/png": "one's new figure"}]


def test_redrawn_figures_keep_their_places() -> None:
    bench = Bench([0, 1])
    for step in range(3):
        for rank in (1, 0):
            bench.clear(rank, wait=True)
            bench.print(rank, f"{rank} at {step}\n")
            bench.pass_time(1)
    assert bench.end() == ["[rank 1] 1 at 2", "[rank 0] 0 at 2"]


def test_clear_keeps_only_the_end_of_long_output() -> None:
    bench = Bench([0, 1], limit_bytes=8 << 20)
    for i in range(300):
        bench.print(1, f"line {i} " + "x" * 10_000 + "\n")
        bench.pass_time(0.1)
    bench.clear(0)
    bench.print(0, "shown before\n")
    bench.pass_time(1)
    bench.clear(0, wait=True)
    bench.print(0, "zero\n")
    lines = bench.end()
    assert lines[0] == "[rank 1] … earlier output is not shown again …"
    assert lines[-1] == "[rank 0] zero"
    assert lines[-2].startswith("[rank 1] line 299 ")
    assert sum(map(len, lines)) < 3 << 20


def test_clear_removes_the_ranks_bar_and_unfinished_line() -> None:
    bench = Bench([0, 1])
    for rank in (0, 1):
        bench.print(rank, f"\r1/9 of {rank}\r2/9 of {rank}", "stderr")
    bench.print(0, "unfinished")
    bench.pass_time(0.5)
    assert len(bench.screen()) == 3
    bench.clear(0)
    bench.print(0, "new\n")
    bench.pass_time(0.5)
    assert sorted(bench.end()) == ["[rank 0] new", "[rank 1] 2/9 of 1"]


def test_updated_display_does_not_count_toward_the_limit() -> None:
    bench = Bench([0], limit_bytes=20_000)
    for step in range(200):
        bench.clear(0, wait=True)
        bench.print(0, f"step {step} " + "x" * 2000 + "\n")
        bench.pass_time(0.1)
    (line,) = bench.end()
    assert line.startswith("[rank 0] step 199 ")


def test_updates_with_unknown_or_empty_ids_are_ignored() -> None:
    bench = Bench([0])
    bench.show(0, {"text/plain": "x"}, "update_display_data")
    bench.show(0, {}, "update_display_data", display_id="a")
    bench.show(0, {})
    bench.show(0, {"application/json": {"a": object()}})
    bench.output.flush(final=True)
    assert len(displays(bench)) == 2


@pytest.mark.parametrize(("encoding", "snow"), [("utf-8", "snow\u2603"), ("ascii", "snow\\u2603")])
def test_plain_script_prints(encoding: str, snow: str) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-X", "utf8=0", "-c", SCRIPT],
        env={"PYTHONPATH": ":".join(sys.path), "PYTHONIOENCODING": encoding, "PATH": ""},
        capture_output=True,
        timeout=150,
        check=False,
    )
    assert done.returncode == 0, done.stderr.decode()
    assert done.stderr.decode() == "[ranks 0-1] 2/2\n"
    assert done.stdout.decode(encoding).splitlines() == [
        "[ranks 0-1] hello",
        "[ranks 0-1] 42",
        *("[ranks 0-1]", "Figure"),
        f"[ranks 0-1] {snow}",
        *("[ranks 0-1]", "Figure"),
    ]


def test_output_follows_redirected_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    output = CellOutput([0], NotebookSink())
    output.feed(0, "stream", {"name": "stdout", "text": "caught\n"}, {})
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", caught := io.StringIO())
        output.flush(final=True)
    assert caught.getvalue() == "[rank 0] caught\n"
