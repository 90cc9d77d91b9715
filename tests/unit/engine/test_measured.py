"""What a rank measures of itself: storages by role, room on the host, bars of tqdm, rounds of optimizer steps."""

from __future__ import annotations

import gc
import sys
import threading

import pytest
import torch

from axon_nb.engine.inspection.memory import capacity
from axon_nb.engine.inspection.telemetry import TqdmBars
from axon_nb.engine.live_objects import LiveTensors, storages_of


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
    gc.callbacks.append(callback)
    sys.setswitchinterval(1e-6)
    builder.start()
    try:
        for _ in range(6):  # a scan that keeps such tuples is found in the first four
            living.storages("cpu", now=True)
    finally:
        stop.set()
        builder.join()
        sys.setswitchinterval(interval)
        gc.callbacks.remove(callback)
    assert errors == []


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
