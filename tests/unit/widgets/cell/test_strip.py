"""The strip's kernel side: queues, clocks, bounds, and the messages that a front end gets."""

from __future__ import annotations

import json
import re
import struct
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
from jupyter_client.blocking.client import BlockingKernelClient

from axon_nb.records.telemetry import Activity, RankState
from axon_nb.widgets import RankStrip
from tests.support.kernel import Kernel


def header_of(message: bytes) -> dict[str, Any]:
    """The JSON header of a packed message."""
    (size,) = struct.unpack_from("<I", message)
    return dict(json.loads(message[8 : 8 + size]))


@pytest.fixture
def strip() -> Iterator[RankStrip]:
    """A strip of ranks 0 and 2 without a front end."""
    made = RankStrip([0, 2], title="In [1]")
    yield made
    made.finish()


def sample(rank: int, activity: Activity = Activity.RUNNING, **more: Any) -> RankState:
    """A sample taken now."""
    return RankState(rank, activity, time.monotonic_ns(), **more)


def test_samples_from_many_threads_arrive(strip: RankStrip) -> None:
    def work() -> None:
        for i in range(200):
            strip.add([sample(0, call=f"call-{i}"), sample(2)])

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        strip.flush()
    words = strip.to_bundle()["text/plain"]
    assert "rank 2: running" in words


def test_excess_samples_are_dropped_and_counted(strip: RankStrip) -> None:
    strip.add([sample(0)] * 50_800)
    assert "800 samples lost" in strip.to_bundle()["text/plain"]


def test_ranks_that_are_not_shown_are_left_out(strip: RankStrip) -> None:
    strip.add([sample(1), sample(0)])
    words = strip.to_bundle()["text/plain"]
    assert "rank 1" not in words
    assert "rank 2: no sample" in words


def test_queue_is_bounded_and_says_so(strip: RankStrip) -> None:
    state = sample(0)
    strip.add(state for _ in range(60_000))
    assert "10000 samples lost" in strip.to_bundle()["text/plain"]


def test_clock_of_another_host_is_translated(strip: RankStrip) -> None:
    away_ns = 10**15
    for rank, offset in ((0, 0), (2, away_ns)):
        now = time.monotonic_ns() + offset
        strip.add([RankState(rank, Activity.RUNNING, now, since_ns=now)])
        strip.add([RankState(rank, Activity.WAITING, now + 10**6, since_ns=now, call="recv")])
    strip.add([sample(2, Activity.DONE)])  # the notebook's own word, on its own clock
    words = strip.to_bundle()["text/plain"]
    # Seconds, not the ten days that lie between the clocks.
    assert re.search(r"^  rank 0: waiting in recv, \d{1,3}\.\d", words, re.MULTILINE), words
    assert re.search(r"^  rank 2: done after \d{1,3}\.\d", words, re.MULTILINE), words


def test_finish_is_idempotent(strip: RankStrip) -> None:
    strip.add([sample(0)])
    strip.finish()
    first = strip.to_bundle()["text/plain"].splitlines()[0]
    strip.add([sample(0, Activity.FAILED)])
    strip.flush()
    strip.finish()
    assert strip.to_bundle()["text/plain"].splitlines()[0] == first


CELL = """
import json, time
from axon_nb.records.telemetry import Activity, RankState
from axon_nb.widgets import RankStrip
strip = RankStrip([0, 1], title="In [1]")
strip.start()
strip.flush()
strip.add([RankState(0, Activity.RUNNING, time.monotonic_ns()), RankState(1, Activity.RUNNING, time.monotonic_ns())])
strip.flush()
strip.flush()
strip.add([RankState(0, Activity.RUNNING, time.monotonic_ns())] * 50_002)
strip.flush()
assert not strip.snapshot
state = strip.get_state()
assert len(state["snapshot"]) > 100
assert not strip.snapshot
strip.finish()
strip.finish()
"""


@pytest.fixture(scope="module")
def kernel() -> Iterator[BlockingKernelClient]:
    """A client of a kernel."""
    with Kernel() as made:
        yield made.client


def messages_of(kernel: BlockingKernelClient, code: str) -> list[dict[str, Any]]:
    """What a front end gets from a cell that has to succeed."""
    heard: list[dict[str, Any]] = []
    reply = kernel.execute_interactive(code, timeout=120, output_hook=heard.append)
    assert reply["content"]["status"] == "ok", reply["content"]
    return [message for message in heard if message["msg_type"] not in ("status", "execute_input")]


def test_front_end_gets_few_messages(kernel: BlockingKernelClient) -> None:
    heard = messages_of(kernel, CELL)
    appends = [message for message in heard if message["content"].get("data", {}).get("method") == "custom"]
    headers = [header_of(bytes(message["buffers"][0])) for message in appends]
    assert [(header["lost"], header["finished"]) for header in headers] == [(0, False), (2, False), (2, True)]
    assert headers[0]["count"] == 2
    kinds = [message["msg_type"] for message in heard]
    shown = heard[kinds.index("display_data")]["content"]
    assert "application/vnd.jupyter.widget-view+json" in shown["data"]
    assert "comm_close" not in kinds, "it stays as it is when the cell ends"
