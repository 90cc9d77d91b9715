"""What a rank's session measures of itself, shares with no other, and sends of its output."""

from __future__ import annotations

import gc
import io
import sys
import threading
from types import TracebackType
from typing import Any

import pytest
import torch
from IPython.core.ultratb import AutoFormattedTB

from axon_nb.engine.debugger import Pager, PostMortem
from axon_nb.engine.groups.abort import AbortedError
from axon_nb.engine.inspection.memory import capacity
from axon_nb.engine.inspection.telemetry import TqdmBars, TrainingJob
from axon_nb.engine.kernel.shell import Tracebacks, shorten_traceback
from axon_nb.engine.live_objects import LiveTensors, storages_of
from axon_nb.engine.output import NativeOutput, NestedErrors, OutputBudget
from axon_nb.records.protocol.cells import AbortLocation
from axon_nb.records.protocol.inspection import FailureRequest
from tests.support.records.rank_session import session_of_rank


def test_abort_reaches_one_session_only() -> None:
    first, second = session_of_rank(0), session_of_rank(1)
    first.groups.abort.set()
    with pytest.raises(AbortedError):
        first.groups.abort.raise_if_set("all_reduce")
    second.groups.abort.raise_if_set("all_reduce")


def test_pending_call_is_in_one_session_only() -> None:
    first, second = session_of_rank(0), session_of_rank(1)
    call = first.groups.calls.start("allreduce", "0", 1, -1, 4)
    assert first.groups.calls.pending() == [call]
    assert second.groups.calls.pending() == []


def test_steps_are_counted_per_session() -> None:
    weight = torch.nn.Parameter(torch.ones(3))
    weight.grad = torch.ones(3)
    optimizers = [torch.optim.SGD([weight], lr=0.1), torch.optim.Adam([weight])]

    def train(steps: int) -> None:
        for _ in range(steps):
            for optimizer in optimizers:
                optimizer.step()

    first, second = (TrainingJob(session_of_rank(rank)) for rank in range(2))
    with first.count_steps():
        train(5)  # each step steps both optimizers
        with second.count_steps():
            train(2)
        optimizers[1].step()  # the same one again: another step
    assert (first.steps.steps, second.steps.steps) == (8, 2)


def test_failure_is_saved_by_one_session_only() -> None:
    first, second = PostMortem(Pager()), PostMortem(Pager())
    first.save(ValueError("odd"), "odd")
    assert first.report(FailureRequest()).failure == "ValueError: odd"
    assert second.report(FailureRequest()).failure == ""
    assert second.start() == ""


def test_swallowed_error_fails_the_cell_of_one_session_only(capsys: pytest.CaptureFixture[str]) -> None:
    first, second = NestedErrors(), NestedErrors()
    replies: list[dict[str, Any]] = [{"status": "ok"}, {"status": "ok"}]
    try:
        raise ValueError("odd")
    except ValueError as error:
        first.note(error, "odd", ["the traceback"], AbortLocation(1, "", ""))
    assert capsys.readouterr().err == "the traceback\n"
    for errors, reply in zip((first, second), replies, strict=True):
        assert errors.fail(reply, None) is None
    assert [reply["status"] for reply in replies] == ["error", "ok"]
    assert (replies[0]["ename"], replies[0]["evalue"]) == ("ValueError", "odd")
    following = {"status": "ok"}
    first.fail(following, None)
    assert following == {"status": "ok"}


def test_storage_counts_once_for_all_views() -> None:
    whole = torch.zeros(100)
    found = storages_of([whole, whole[10:], whole.view(10, 10), torch.zeros(5), torch.zeros(3, device="meta")], "cpu")
    assert sorted(found.values()) == [20, 400]


class Refusing(torch.Tensor):
    """A subclass whose every operation raises an error of its own."""

    @classmethod
    def __torch_function__(cls, *given: object) -> object:
        raise LookupError("not here")


def test_tensors_without_a_storage_are_skipped() -> None:
    refusing = torch.zeros(7).as_subclass(Refusing)
    uninitialized = torch.nn.LazyLinear(3).weight
    assert list(storages_of([refusing, uninitialized, torch.zeros(5)], "cpu").values()) == [20]
    assert LiveTensors().storages("cpu")


def test_live_tensors_are_found_with_few_scans() -> None:
    kept, living = [torch.zeros(12345)], LiveTensors()
    assert 4 * 12345 in living.storages("cpu").values()
    kept.append(torch.zeros(23456))
    assert 4 * 23456 not in living.storages("cpu").values(), "too early for another look"
    assert 4 * 23456 in living.storages("cpu", now=True).values()
    assert len(kept) == 2


def test_scans_do_not_touch_tuples_of_other_threads() -> None:
    errors: list[BaseException] = []
    stop = threading.Event()

    def build() -> None:
        try:
            while not stop.is_set():
                assert len(tuple(number for number in range(15))) == 15
        except BaseException as error:
            errors.append(error)

    def callback(phase: str, info: dict[str, int]) -> None:  # as Hypothesis has one: threads switch in it
        sum(range(100))

    builder = threading.Thread(target=build)
    interval, living = sys.getswitchinterval(), LiveTensors()
    gc.freeze()  # what other tests have left is not scanned, but as much as a rank has
    objects: list[list[int]] = [[] for _ in range(200_000)]
    gc.callbacks.append(callback)
    sys.setswitchinterval(1e-6)
    builder.start()
    try:
        for _ in range(30):  # a scan that keeps such tuples is found in the first three
            living.storages("cpu", now=True)
    finally:
        stop.set()
        builder.join()
        sys.setswitchinterval(interval)
        gc.callbacks.remove(callback)
        gc.unfreeze()
    assert errors == []
    assert len(objects) == 200_000


def test_cpu_capacity_is_used_plus_free_memory() -> None:
    limit, taken = capacity(torch.device("cpu"), 1000)
    assert taken == 1000
    assert limit is not None
    assert limit > 1000


def test_tqdm_bars_are_tracked_open_and_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    tqdm = pytest.importorskip("tqdm", reason="needs tqdm: pip install tqdm")
    kind = sys.modules["tqdm.std"].tqdm
    close = kind.close
    monkeypatch.setattr(kind, "close", close)  # put back afterwards
    bars = TqdmBars()
    assert bars.read() == []
    with open("/dev/null", "w") as nowhere:
        with tqdm.tqdm(total=10, desc="epochs", file=nowhere) as outer:
            outer.update(3)
            inner = tqdm.tqdm(range(4), desc="batches", file=nowhere, leave=False)
            assert [(bar.desc, bar.depth, bar.done, bar.total, bar.is_over) for bar in bars.read()] == [
                ("epochs", 0, 3, 10, False),
                ("batches", 1, 0, 4, False),
            ]
            list(inner)
            tqdm.tqdm(range(4), disable=True, file=nowhere)
            assert [(bar.desc, bar.done, bar.is_over) for bar in bars.read()] == [
                ("epochs", 3, False),
                ("batches", 4, True),
            ]
        assert next((bar.desc, bar.done, bar.is_over) for bar in bars.read()) == ("epochs", 3, True)


class _Stream(io.StringIO):
    """A stream that is flushed just before a text of another thread is in its buffer."""

    sent = ""

    def write(self, text: str) -> int:
        self.flush()
        return super().write(text)

    def flush(self) -> None:
        self.sent = self.getvalue()


def test_flush_during_a_write_does_not_delay_text(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = _Stream()
    monkeypatch.setattr(sys, "stdout", stream)
    monkeypatch.setattr(sys, "stderr", _Stream())
    OutputBudget(None, NativeOutput(()), 100)
    sys.stdout.write("a child speaks\n")
    sys.stdout.flush()
    assert stream.sent == "a child speaks\n"


def down(n: int) -> None:
    if not n:
        raise ValueError("the bottom")
    down(n - 1)


def depth(trace: TracebackType | None) -> int:
    count = 0
    while trace is not None:
        count, trace = count + 1, trace.tb_next
    return count


def caught(n: int) -> ValueError:
    try:
        down(n)
    except ValueError as error:
        return error
    raise AssertionError


def test_ends_of_a_long_traceback_are_kept() -> None:
    trace = caught(500).__traceback__
    assert trace is not None
    short, left_out = shorten_traceback(trace)
    assert depth(trace) == depth(short) + left_out
    assert depth(short) == 21
    first, last = short, short
    while last.tb_next is not None:
        last = last.tb_next
    assert first.tb_frame.f_code.co_name == "caught"
    assert last.tb_lineno == down.__code__.co_firstlineno + 2


def test_short_traceback_is_unchanged() -> None:
    trace = caught(5).__traceback__
    assert trace is not None
    assert shorten_traceback(trace) == (trace, 0)


def test_truncated_rendering_states_the_omission_and_keeps_the_exception() -> None:
    render = Tracebacks().bound(AutoFormattedTB(mode="Context", theme_name="nocolor").structured_traceback)
    outer = RuntimeError("the effect")
    outer.__cause__ = cause = caught(500)
    before = depth(cause.__traceback__)
    text = "".join(render(RuntimeError, outer, None))
    assert "ValueError: the bottom" in text
    assert "RuntimeError: the effect" in text
    assert f"({before - 21} calls are not shown.)" in text
    assert depth(cause.__traceback__) == before
    assert "not shown" not in "".join(render(ValueError, ValueError("x"), None))


def test_calls_of_many_functions_are_kept_up_to_a_limit() -> None:
    space: dict[str, Any] = {}
    source = "def f0():\n    raise ValueError('the bottom')\n" + "".join(
        f"def f{i}():\n    f{i - 1}()\n" for i in range(1, 200)
    )
    exec(source, space)
    for count, expected in ((50, 51), (199, 90)):
        with pytest.raises(ValueError, match="the bottom") as caught_here:
            space[f"f{count}"]()
        trace = caught_here.value.__traceback__
        assert trace is not None
        assert trace.tb_next is not None
        assert depth(shorten_traceback(trace.tb_next)[0]) == expected
