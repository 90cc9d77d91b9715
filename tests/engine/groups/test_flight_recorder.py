"""Reading torch's flight recorder: real dumps of Gloo, which writes them in NCCL's format."""

from __future__ import annotations

import json
import sys
import threading
import time
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
import torch.distributed as dist

from axon_nb.engine.groups import flight_recorder
from axon_nb.engine.groups.abort import AbortFlag
from axon_nb.engine.groups.flight_recorder import native_waits, overdue, synchronizes_in
from axon_nb.engine.groups.nccl import poll_until
from axon_nb.records.waits.calls import GroupWaits, PendingCall, RankWaits
from axon_nb.records.waits.deadlocks import explain_deadlock
from tests.engine.groups.native_ranks import groups_on, run_on_ranks


def _records(rank: int, store: Any) -> dict[str, Any]:
    own = dist.new_group([0, 1], group_desc="mine")
    dist.all_reduce(torch.ones(3))
    dist.all_reduce(torch.ones(3), group=own)
    works = [dist.all_reduce(torch.ones(5), async_op=True)] if rank == 0 else []
    groups = groups_on(store)
    before, groups.rebuilt_at_ns = groups.rebuilt_at_ns, 0
    end = time.monotonic() + 60
    while True:  # torch notes the end of an operation a little later
        answer = native_waits(groups, [], {"other": 7}, recorder="fr")
        if len(answer.pending) == len(works) or time.monotonic() > end:
            break
    later = flight_recorder.parse(flight_recorder.dump("fr"), {"0": [0, 1]}, since_ns=before)
    dist.barrier(group=own)
    if rank == 1:
        dist.all_reduce(torch.ones(5))
    for work in works:
        work.wait()
    return {"answer": asdict(answer), "name": own.group_name, "later": (len(later.pending), dict(later.counts))}


def test_dump_shows_the_collective_of_each_rank(tmp_path: Path) -> None:
    results = run_on_ranks(_records, 2, tmp_path, TORCH_FR_BUFFER_SIZE="100")
    name = results[0]["name"]
    assert results[0]["answer"]["counts"] == {"0": 2, name: 1, "other": 7}
    assert results[1]["answer"]["counts"] == {"0": 1, name: 1, "other": 7}
    assert results[1]["answer"]["pending"] == ()
    (pending,) = results[0]["answer"]["pending"]
    call = PendingCall(**pending)
    assert (call.name, call.group, call.ranks, call.sequence, call.peer, call.bytes) == (
        "allreduce",
        "0",
        (0, 1),
        2,
        -1,
        20,
    )
    assert 0 <= call.seconds < 1000
    # What began before the groups were formed is over.
    assert results[0]["later"] == results[1]["later"] == (0, {"0": 0})
    # And the graph of waits takes it: rank 1 has ended the cell, so nobody will come.
    reports = {
        0: RankWaits(0, True, 4, "torch.cuda.synchronize() behind allreduce", (call,), results[0]["answer"]["counts"]),
        1: RankWaits(1, False, None, "", (), results[1]["answer"]["counts"]),
    }
    assert explain_deadlock(reports, [0, 1], 0.0) == (
        "rank 0 waits in torch.cuda.synchronize() behind allreduce at line 4 for rank 1, which has finished the cell."
    )


def _waits_in_the_fence(rank: int, store: Any) -> dict[str, Any]:
    """Rank 1 leaves out a collective; rank 0 stands in the fence of an optimizer step behind it."""
    groups = groups_on(store)
    groups.rebuilt_at_ns = 0
    seen: list[GroupWaits] = []
    if rank == 0:
        work = dist.all_reduce(torch.ones(5), async_op=True)

        def look() -> None:
            end = time.monotonic() + 60
            while not seen or (not seen[-1].call and time.monotonic() < end):
                seen.append(native_waits(groups, [], {}, recorder="fr"))

        watcher = threading.Thread(target=look)
        watcher.start()
        poll_until(lambda: not watcher.is_alive(), AbortFlag())
    else:
        seen.append(native_waits(groups, [], {}, recorder="fr"))
    store.set(f"seen{rank}", "1")
    store.wait(["seen0", "seen1"])
    if rank == 1:
        dist.all_reduce(torch.ones(5))
    else:
        work.wait()
    return asdict(seen[-1])


def test_step_fence_waits_for_the_rank_that_skipped_a_collective(tmp_path: Path) -> None:
    results = run_on_ranks(_waits_in_the_fence, 2, tmp_path, TORCH_FR_BUFFER_SIZE="100")
    waiting, finished = results[0], results[1]
    calls = tuple(PendingCall(**call) for call in waiting["pending"])
    reports = {
        0: RankWaits(0, True, 7, waiting["call"], calls, waiting["counts"]),
        1: RankWaits(1, False, None, "", (), finished["counts"]),
    }
    assert explain_deadlock(reports, [0, 1], 0.0) == (
        "rank 0 waits in optimizer.step() behind allreduce at line 7 for rank 1, which has finished the cell."
    )


def _is_overdue(rank: int, store: Any) -> list[str]:
    """Rank 1 comes late to a collective of a group whose timeout is over."""
    groups = groups_on(store)
    groups.rebuilt_at_ns = 0
    said = [overdue(groups, recorder="fr")]
    if rank == 0:
        work = dist.all_reduce(torch.ones(5), async_op=True)
        time.sleep(1.1)
        said.append(overdue(groups, recorder="fr"))
        groups.timeout_of = lambda group: timedelta(seconds=1)  # type: ignore[method-assign]
        said.append(overdue(groups, recorder="fr"))
        store.set("late", "1")
        work.wait()
    else:
        store.wait(["late"])
        dist.all_reduce(torch.ones(5))
    return said


def test_collective_past_its_timeout_is_reported(tmp_path: Path) -> None:
    results = run_on_ranks(_is_overdue, 2, tmp_path, TORCH_FR_BUFFER_SIZE="100")
    late = "all_reduce has been in progress for 1 s, and its group's timeout is 1 s"
    assert results == {0: ["", "", late], 1: [""]}


def test_missing_or_empty_recorder_reports_nothing() -> None:
    empty = flight_recorder.parse(b"", {"0": [0, 1]})
    assert (empty.pending, dict(empty.counts)) == ((), {"0": 0})
    assert flight_recorder.dump("none such") == b""


def test_send_and_recv_name_the_peers_global_rank() -> None:
    entry = {
        "process_group": ["3", "undefined"],
        "time_created_ns": time.time_ns(),
        "is_p2p": True,
        "collective_seq_id": 4,
        "retired": False,
        "state": "started",
        "record_id": 9,
        "input_sizes": [[2, 3]],
        "input_dtypes": ["BFloat16"],
    }
    recv = {**entry, "profiling_name": "nccl:recv 0<-1"}
    send = {**entry, "profiling_name": "nccl:send 0->1", "record_id": 8}
    done = {**entry, "profiling_name": "nccl:send 0->1", "state": "completed"}
    seen = flight_recorder.parse(json.dumps({"entries": [recv, send, done]}).encode(), {"3": [2, 6]})
    found = [(call.name, call.peer, call.sequence, call.bytes) for call in seen.pending]
    assert found == [("send", 6, 0, 12), ("recv", 6, 0, 12)]
    assert dict(seen.counts) == {"3": 0}


@pytest.mark.parametrize(
    ("file", "name", "expected"),
    [
        ("/somewhere/torch/cuda/__init__.py", "synchronize", "torch.cuda.synchronize()"),
        ("/somewhere/torch/cuda/streams.py", "synchronize", ""),  # of one stream
        ("/somewhere/torch/cuda/__init__.py", "current_device", ""),
        ("cell", "synchronize", ""),
        ("cell", "poll_until", ""),
    ],
)
def test_only_device_synchronization_counts_as_waiting(file: str, name: str, expected: str) -> None:
    go_on, begun = threading.Lock(), threading.Event()
    go_on.acquire()
    names = {"wait": go_on.__enter__, "begin": begun.set}
    exec(compile(f"def {name}():\n    begin()\n    wait()", file, "exec"), names)
    thread = threading.Thread(target=names[name])
    thread.start()
    assert begun.wait(60)
    end = time.monotonic() + 60
    while (found := _innermost(thread)) is None or (found.f_code.co_name != name and time.monotonic() < end):
        pass
    assert synchronizes_in(found) == expected
    assert synchronizes_in(None) == ""
    go_on.release()
    thread.join()


def _innermost(thread: threading.Thread) -> FrameType | None:
    return sys._current_frames().get(thread.ident or 0)
