"""Reads torch's flight recorder: which rank is in which collective, for groups whose operations run no Python.

Private hooks: `_dump_nccl_trace_json`, in builds with NCCL, and `_dump_fr_trace_json` for Gloo write the same format,
which `parse` reads. Without them deadlocks on NCCL are not detected. `_enable_collectives_timing` makes NCCL measure
its operations; without it timelines show when they were launched.

What this rank waits for in torch's own groups follows from the recorder's operations and from the stack.

On NCCL a collective is only queued on the GPU; the thread stops later, when it needs a value. Which of the queued
operations that value depends on cannot be seen from outside: an `irecv` for the next step may stay pending for long
while nothing waits for it. So a wait counts in three places only: `torch.cuda.synchronize` and the fence of an
optimizer step, which need all of them, and a blocking function of torch.distributed, such as `barrier`, which needs
the one started last.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import time
from collections.abc import Collection, Mapping, Sequence
from math import prod
from types import FrameType
from typing import Any

import torch.distributed as dist
from msgspec import Struct
from torch._C import _distributed_c10d

from axon_nb.comm.spans import DeviceClock
from axon_nb.engine.frames import main_frame
from axon_nb.engine.groups.abort import NativeGroups
from axon_nb.engine.groups.creation import poll_until
from axon_nb.records.hooks import missing_hooks
from axon_nb.records.spans import GPU, LAUNCH, Span
from axon_nb.records.waits import PUBLIC_NAMES, GroupWaits, PendingCall

_BYTES = {
    "Bool": 1,
    "Byte": 1,
    "Char": 1,
    "Float8_e4m3fn": 1,
    "Float8_e5m2": 1,
    "BFloat16": 2,
    "Half": 2,
    "Short": 2,
    "Float": 4,
    "Int": 4,
    "ComplexFloat": 8,
    "Double": 8,
    "Long": 8,
}
_NAMES = {
    "_all_gather_base": "_allgather_base",
    "_broadcast_oop": "broadcast",
    "_reduce_oop": "reduce",
    "all_gather": "allgather",
    "all_gather_into_tensor_coalesced": "allgather_into_tensor_coalesced",
    "all_reduce": "allreduce",
    "all_reduce_barrier": "barrier",
    "all_to_all": "alltoall",
}
"""What other groups call the operations that NCCL's has other names for."""
_POINT_TO_POINT = re.compile(r"(send|recv) (\d+)(?:->|<-)(\d+)")
_CUDA_FILE = os.path.join("torch", "cuda", "__init__.py")
_MAX_STARTED = 8
"""Collectives that are reported wherever the main thread is."""
_UNTITLED = frozenset({"", "default_pg", "undefined"})
"""What torch has as the description of a group that was made without one."""
_CALLS_OF_A_POLL = 3
"""How many frames deep a poll may be in a call: it asks the event, or looks for an abort."""


class Recording(Struct, frozen=True):
    """What the recorder holds on some groups."""

    pending: tuple[PendingCall, ...]
    """Operations in progress, oldest first."""
    counts: Mapping[str, int]
    """Number of collectives started, by group, as far back as the recorder reaches."""


def dump(recorder: str = "nccl") -> bytes:
    """Return the recorder's content as JSON; empty if this torch has no such recorder, ``nccl`` or ``fr`` (Gloo)."""
    hook = getattr(_distributed_c10d, f"_dump_{recorder}_trace_json", None)
    return b"" if hook is None else bytes(hook(True, False))


def parse(content: bytes, groups: Mapping[str, Sequence[int]], *, since_ns: int = 0) -> Recording:
    """Parse a dump.

    Args:
        content: What `dump` returned.
        groups: Global ranks by group name, in the order of group ranks; other groups are left out.
        since_ns: Time in nanoseconds since 1970; operations started before belong to replaced backends.
    """
    now = time.time_ns()
    pending: list[PendingCall] = []
    counts = dict.fromkeys(groups, 0)
    for entry in json.loads(content).get("entries", []) if content else []:
        group = entry["process_group"][0]
        if group not in groups or entry["time_created_ns"] < since_ns:
            continue
        if not entry["is_p2p"]:
            counts[group] = max(counts[group], entry["collective_seq_id"])
        if entry["retired"] or entry["state"] == "completed":
            continue
        pending.append(_call(entry, group, groups[group], now))
    return Recording(tuple(sorted(pending, key=lambda call: call.number)), counts)


class FinishedCalls:
    """Reads operations that have finished, as spans for a timeline.

    torch records when an operation was launched, how long it ran on the GPU if timing is enabled, and when its watchdog
    saw that it was over, which may be a tenth of a second late. When it began is estimated: not before its launch nor
    before the end of the previous one of its group, not too late for its end, and else as the clock of the GPU has it.
    """

    def __init__(self, rank: int, clock: DeviceClock) -> None:
        self._rank = rank
        self._clock = clock
        self._seen: set[int] = set()
        self._ends: dict[str, int] = {}
        """When the last measured operation of a queue ended, by group and peer, in monotonic nanoseconds."""
        self._timed: set[tuple[str, int]] = set()

    def enable_timing(self, native: NativeGroups) -> None:
        """Make torch measure how long operations run; once for the groups since a rebuild, as it cannot be undone."""
        if missing_hooks("groups.collective_timing"):
            return
        for group in native.all():
            if (key := (str(group.group_name), native.rebuilt_at_ns)) not in self._timed:
                self._timed.add(key)
                with contextlib.suppress(RuntimeError):  # its backend cannot
                    group._enable_collectives_timing()  # type: ignore[attr-defined]

    def read(self, content: bytes, groups: Collection[str]) -> list[Span]:
        """Return the operations that have finished since the last call, in the order of their launch.

        Args:
            content: What `dump` returned.
            groups: Names of groups; others are left out.
        """
        entries = json.loads(content).get("entries", []) if content else []
        to_monotonic = time.monotonic_ns() - time.time_ns()
        spans = []
        for entry in entries:
            is_over = entry["retired"] and entry["time_discovered_completed_ns"]
            if is_over and entry["process_group"][0] in groups and entry["record_id"] not in self._seen:
                self._seen.add(entry["record_id"])
                spans.append(self._span(entry, to_monotonic))
        self._seen &= {entry["record_id"] for entry in entries}
        return spans

    def _span(self, entry: dict[str, Any], to_monotonic: int) -> Span:
        group, is_message = entry["process_group"][0], entry["is_p2p"]
        name = entry["profiling_name"].partition(":")[2]
        launched, over = (entry[f"time_{key}_ns"] + to_monotonic for key in ("created", "discovered_completed"))
        if (length_ms := entry.get("duration_ms")) is None:
            start, end, clock = launched, max(launched, over), LAUNCH
        else:
            length, queue = round(length_ms * 1e6), f"{group} {name if is_message else ''}"
            latest = over - length
            if entry["time_discovered_started_ns"]:
                latest = min(latest, entry["time_discovered_started_ns"] + to_monotonic)
            earliest = max(launched, self._ends.get(queue, launched))
            start = max(earliest, min(latest, self._clock.estimate(launched)))
            end, clock = start + length, GPU
            self._ends[queue] = end
        if match := _POINT_TO_POINT.match(name):
            name = match[1]
        name = _NAMES.get(name, name)
        kind, sequence = ("p2p", 0) if is_message else ("collective", entry["collective_seq_id"])
        return Span(self._rank, kind, name, start, end, group, bytes=_payload(entry), sequence=sequence, clock=clock)


def _call(entry: dict[str, Any], group: str, ranks: Sequence[int], now: int) -> PendingCall:
    name, peer = entry["profiling_name"].partition(":")[2], -1
    if match := _POINT_TO_POINT.match(name):
        name, peer = match[1], ranks[int(match[3])]
    return PendingCall(
        number=entry["record_id"],
        name=_NAMES.get(name, name),
        group=group,
        ranks=tuple(sorted(ranks)),
        sequence=0 if entry["is_p2p"] else entry["collective_seq_id"],
        peer=peer,
        bytes=_payload(entry),
        seconds=max(0, now - entry["time_created_ns"]) / 1e9,
    )


def _payload(entry: dict[str, Any]) -> int:
    """Bytes of the whole tensor: an all_gather's output, a reduce_scatter's input."""
    tensors = (zip(entry[f"{side}_sizes"], entry[f"{side}_dtypes"], strict=False) for side in ("input", "output"))
    sums: list[int] = [sum(prod(size) * _BYTES.get(dtype, 0) for size, dtype in each) for each in tensors]
    return max(sums)


def native_waits(
    native: NativeGroups, pending: Sequence[PendingCall], counts: Mapping[str, int], *, recorder: str = "nccl"
) -> GroupWaits:
    """Return the calls in progress, and the number of collectives started by group.

    While the main thread waits for all work on its GPU and an operation is in progress, the reply has `call`, too.

    Args:
        native: The groups.
        pending: Calls in progress in other groups of this rank.
        counts: Number of collectives started in those.
        recorder: The same as for `dump`.
    """
    groups = {str(group.group_name): dist.get_process_group_ranks(group) for group in native.all()}
    recording = parse(dump(recorder), groups, since_ns=native.rebuilt_at_ns)
    recorded = list(recording.pending)
    counts = {**counts, **recording.counts}
    collectives = [call for call in recorded if call.sequence]
    started = tuple(collectives[:_MAX_STARTED])
    if recorded and not pending and (place := synchronizes_in(main_frame())):
        return GroupWaits(tuple(recorded), counts, call=f"{place} behind {recorded[0].name}", started=started)
    return GroupWaits((*pending, *collectives[-1:]), counts, started=started)


def overdue(native: NativeGroups, content: bytes) -> str:
    """Return which operation has exceeded the timeout of its group; empty if none has.

    torch's own handling of timeouts is off on NCCL, because it ends the process. It has the same limit, from the launch
    of an operation, and for sends and receives, too.

    Args:
        native: The groups.
        content: What `dump` returned.
    """
    groups = {str(group.group_name): group for group in native.all()}
    ranks = {name: dist.get_process_group_ranks(group) for name, group in groups.items()}
    for call in parse(content, ranks, since_ns=native.rebuilt_at_ns).pending:
        limit_s = native.timeout_of(groups[call.group]).total_seconds()
        if call.seconds > limit_s:
            name = PUBLIC_NAMES.get(call.name, call.name)
            if call.peer >= 0:
                name += f" {'to' if call.name == 'send' else 'from'} rank {call.peer}"
            if (title := str(groups[call.group].group_desc)) not in _UNTITLED:  # NCCL calls its communicator so, too
                name += f" in group {title!r}"
            return f"{name} has been in progress for {call.seconds:.0f} s, and its group's timeout is {limit_s:g} s"
    return ""


def synchronizes_in(frame: FrameType | None) -> str:
    """Return the function in which the innermost `frame` waits for all work queued on its GPU; empty if it does not."""
    if frame is None:
        return ""
    if frame.f_code.co_name == "synchronize" and frame.f_code.co_filename.endswith(_CUDA_FILE):
        return "torch.cuda.synchronize()"
    for _ in range(_CALLS_OF_A_POLL):
        if frame is not None and frame.f_code is poll_until.__code__:
            return "optimizer.step()"
        frame = None if frame is None else frame.f_back
    return ""
