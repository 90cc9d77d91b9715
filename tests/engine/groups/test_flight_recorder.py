"""NCCL's flight recorder: its dumps are read, and show which rank waits for which."""

from __future__ import annotations

import json
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from msgspec import to_builtins

from axon_nb.comm.spans import DeviceClock
from axon_nb.engine.groups import flight_recorder
from axon_nb.engine.groups.abort import AbortFlag
from axon_nb.engine.groups.creation import poll_until
from axon_nb.engine.groups.flight_recorder import FinishedCalls, native_waits, overdue, synchronizes_in
from axon_nb.plan.traffic.plan import count_calls
from axon_nb.records.spans import SpanRing
from axon_nb.records.waits import GroupWaits, PendingCall, RankWaits, explain_deadlock
from tests.engine.groups.native_ranks import groups_on, run_on_ranks


def entry(
    number: int,
    *,
    created: int,
    completed: int = 0,
    started: int = 0,
    duration_ms: float | None = None,
    name: str = "all_reduce",
    group: str = "0",
    is_p2p: bool = False,
) -> dict[str, Any]:
    """Return what the recorder has of one operation on 1 MiB of float32; times in nanoseconds since 1970, 0: none."""
    state = "completed" if completed else "started" if started else "scheduled"
    fields = {
        "collective_seq_id": 0 if is_p2p else number,
        "input_dtypes": ["Float"],
        "input_sizes": [[512, 512]],
        "is_p2p": is_p2p,
        "op_id": number,
        "output_dtypes": ["Float"],
        "output_sizes": [[512, 512]],
        "p2p_seq_id": number if is_p2p else 0,
        "pg_id": 0,
        "process_group": [group, "default_pg"],
        "profiling_name": f"nccl:{name}",
        "record_id": number,
        "retired": bool(completed),
        "state": state,
        "thread_id": "140578545150848",
        "thread_name": "python",
        "time_created_ns": created,
        "time_discovered_completed_ns": completed,
        "time_discovered_started_ns": started,
        "timeout_ms": 1800000,
    }
    return fields if duration_ms is None else {**fields, "duration_ms": duration_ms}


def dump_of(*entries: dict[str, Any]) -> bytes:
    """Return the dump of these operations."""
    return json.dumps({"version": "2.10", "comm_lib_version": "2.28.9", "entries": list(entries)}).encode()


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
        if len(answer.started) == len(works) or time.monotonic() > end:
            break
    later = flight_recorder.parse(flight_recorder.dump("fr"), {"0": [0, 1]}, since_ns=before)
    dist.barrier(group=own)
    if rank == 1:
        dist.all_reduce(torch.ones(5))
    for work in works:
        work.wait()
    return {"answer": to_builtins(answer), "name": own.group_name, "later": (len(later.pending), dict(later.counts))}


def test_dump_shows_the_collective_of_each_rank(tmp_path: Path) -> None:
    results = run_on_ranks(_records, 2, tmp_path, TORCH_FR_BUFFER_SIZE="100")
    name = results[0]["name"]
    assert results[0]["answer"]["counts"] == {"0": 2, name: 1, "other": 7}
    assert results[1]["answer"]["counts"] == {"0": 1, name: 1, "other": 7}
    assert results[1]["answer"]["pending"] == results[1]["answer"]["started"] == ()
    assert [call["sequence"] for call in results[0]["answer"]["started"]] == [2]
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
    return to_builtins(seen[-1])


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
    own = dist.new_group([0, 1], group_desc="mine")
    said = [overdue(groups, flight_recorder.dump("fr"))]
    if rank == 0:
        work = dist.all_reduce(torch.ones(5), group=own, async_op=True)
        time.sleep(1.1)
        said.append(overdue(groups, flight_recorder.dump("fr")))
        groups.timeout_of = lambda group: timedelta(seconds=1)  # type: ignore[method-assign]
        said.append(overdue(groups, flight_recorder.dump("fr")))
        store.set("late", "1")
        work.wait()
    else:
        store.wait(["late"])
        dist.all_reduce(torch.ones(5), group=own)
    return said


def test_collective_past_its_timeout_is_reported(tmp_path: Path) -> None:
    results = run_on_ranks(_is_overdue, 2, tmp_path, TORCH_FR_BUFFER_SIZE="100")
    late = "all_reduce in group 'mine' has been in progress for 1 s, and its group's timeout is 1 s"
    assert results == {0: ["", "", late], 1: [""]}


def _message_is_overdue(rank: int, store: Any) -> list[str]:
    groups = groups_on(store)
    groups.rebuilt_at_ns = 0
    now = time.time_ns()
    times = (now - 59 * 10**9, now - 61 * 10**9)  # the groups' timeout is 60 s
    return [overdue(groups, dump_of(entry(3, created=created, name="recv 0<-1", is_p2p=True))) for created in times]


def test_message_past_its_timeout_is_reported(tmp_path: Path) -> None:
    late = "recv from rank 1 has been in progress for 61 s, and its group's timeout is 60 s"
    assert run_on_ranks(_message_is_overdue, 2, tmp_path) == {0: ["", late], 1: ["", late]}


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
        "output_sizes": [[2, 3]],
        "output_dtypes": ["BFloat16"],
    }
    recv = {**entry, "profiling_name": "nccl:recv 0<-1"}
    send = {**entry, "profiling_name": "nccl:send 0->1", "record_id": 8}
    done = {**entry, "profiling_name": "nccl:send 0->1", "state": "completed"}
    seen = flight_recorder.parse(json.dumps({"entries": [recv, send, done]}).encode(), {"3": [2, 6]})
    found = [(call.name, call.peer, call.sequence, call.bytes) for call in seen.pending]
    assert found == [("send", 6, 0, 12), ("recv", 6, 0, 12)]
    assert dict(seen.counts) == {"3": 0}


def _times(*entries: dict[str, Any], origin: int, reader: FinishedCalls | None = None) -> list[tuple[Any, ...]]:
    """Name, start and end in ms after `origin`, and whose clock, of the finished operations of group 0."""
    to_wall = time.time_ns() - time.monotonic_ns()
    spans = (reader or FinishedCalls(3, DeviceClock(SpanRing()))).read(dump_of(*entries), {"0"})

    def ms(time_ns: int) -> int:
        return round((time_ns + to_wall - origin) / 1e6)

    return [(span.name, ms(span.start_ns), ms(span.end_ns), span.clock) for span in spans]


def test_measured_operations_have_their_own_length() -> None:
    origin, ms = time.time_ns(), 1_000_000
    # Both were launched at once, and the watchdog saw both at 100 ms: the second ran behind the first.
    first = entry(1, created=origin, completed=origin + 100 * ms, duration_ms=30.0)
    second = entry(2, created=origin + ms, completed=origin + 100 * ms, started=origin + 100 * ms, duration_ms=20.5)
    assert _times(first, second, origin=origin) == [
        ("allreduce", 0, 30, "gpu"),
        ("allreduce", 30, 50, "gpu"),
    ]


def test_operation_that_nothing_measured_has_the_time_of_its_launch() -> None:
    origin, ms = time.time_ns(), 1_000_000
    launched = entry(1, created=origin, completed=origin + 70 * ms)
    assert _times(launched, origin=origin) == [("allreduce", 0, 70, "launch")]


def test_finished_operations_are_read_once_each() -> None:
    origin, ms = time.time_ns(), 1_000_000
    reader = FinishedCalls(3, DeviceClock(SpanRing()))
    running = entry(1, created=origin, started=origin + ms)
    message = entry(2, created=origin, completed=origin + 9 * ms, duration_ms=2.0, name="send 0->1", is_p2p=True)
    foreign = entry(3, created=origin, completed=origin + 9 * ms, duration_ms=2.0, group="7")
    assert _times(running, message, foreign, origin=origin, reader=reader) == [("send", 0, 2, "gpu")]
    done = entry(1, created=origin, started=origin + ms, completed=origin + 20 * ms, duration_ms=18.0)
    assert _times(done, message, foreign, origin=origin, reader=reader) == [("allreduce", 0, 18, "gpu")]
    assert _times(done, message, foreign, origin=origin, reader=reader) == []
    (span,) = FinishedCalls(3, DeviceClock(SpanRing())).read(dump_of(done), {"0"})
    assert (span.rank, span.kind, span.group, span.bytes, span.sequence) == (3, "collective", "0", 2**20, 1)


def test_calls_of_a_step_have_the_names_and_bytes_that_the_plan_has() -> None:
    part, whole = [[512, 512]], [[1024, 512]]
    calls = [("_all_gather_base", part, whole), ("_reduce_scatter_base", whole, part), ("all_reduce", part, part)]
    entries = [
        {**entry(number, created=1, completed=2, name=name), "input_sizes": inputs, "output_sizes": outputs}
        for number, (name, inputs, outputs) in enumerate(calls, 1)
    ]
    spans = FinishedCalls(3, DeviceClock(SpanRing())).read(dump_of(*entries), {"0"})
    assert count_calls(((span.group, span.name, span.bytes) for span in spans), {"0": "dp"}) == {
        ("dp", "all_gather"): (1, 2 * 2**20),
        ("dp", "reduce_scatter"): (1, 2 * 2**20),
        ("dp", "all_reduce"): (1, 2**20),
    }


def _reads_gloo(rank: int, store: Any) -> tuple[list[str], list[str]]:
    for _ in range(3):
        dist.all_reduce(torch.ones(3))
    dist.barrier()
    content = flight_recorder.dump("fr")
    fields = sorted(json.loads(content)["entries"][0])
    return fields, [span.name for span in FinishedCalls(rank, DeviceClock(SpanRing())).read(content, {"0"})]


def test_recorder_without_times_gives_no_spans(tmp_path: Path) -> None:
    fields, names = run_on_ranks(_reads_gloo, 1, tmp_path, TORCH_FR_BUFFER_SIZE="100")[0]
    assert fields == sorted(entry(1, created=1))  # the recorded dumps have the fields of this torch
    assert names == []  # Gloo's operations do not say when they ended


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
