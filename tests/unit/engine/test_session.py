"""What a rank's session measures of itself, and that two sessions in one process share nothing."""

from __future__ import annotations

import gc
import sys
import threading
from typing import Any

import pytest
import torch

from axon_nb.engine.debugger import Pager, PostMortem
from axon_nb.engine.groups.abort import AbortedError
from axon_nb.engine.inspection.memory import capacity
from axon_nb.engine.inspection.telemetry import TqdmBars, TrainingJob
from axon_nb.engine.live_objects import LiveTensors, storages_of
from axon_nb.engine.output import NestedErrors
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
