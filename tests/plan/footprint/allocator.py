"""The real memory of a training step, from the allocator events that torch's profiler records."""

from __future__ import annotations

import bisect
import gc
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from torch._C._profiler import _EventType
from torch.profiler import ProfilerActivity, profile, record_function

_STEP = "a measured step"
_NEVER = 1 << 63
Steps = tuple[Callable[[], None], Callable[[], Any]]
Change = tuple[int, int, int]
"""Time in ns, address and bytes: positive for an allocation, negative for a free."""


@dataclass
class _Block:
    size: int
    begin: int
    end: int = _NEVER
    seen: bool = False
    """Whether its free was recorded. If not, it happened before `end`, when its address was reused."""


def allocated(make: Callable[[], Steps], *, warm_ups: int, steps: int = 8) -> dict[str, Any]:
    """Bytes that the allocator has given out, at the highest moment of a step and at its end.

    A thread of Gloo lets go of a buffer some time after the collective is over. Where the rank has let go of it sooner,
    the thread gives it back: late when the machine is busy, and unseen, as the profiler records what the rank's own
    thread does. Both only ever add to what a step seems to take, so of all steps the lowest counts. All is given up
    before the recording ends: what was given back unseen was made in a step for this step, and does not count in later
    ones.

    Args:
        make: Makes everything; returns a step up to the optimizer's, and what comes between steps.
        warm_ups: Steps before those that count.
        steps: How many count.

    Returns:
        ``peak`` and ``end`` in bytes; ``peaks``, of each step; and as ``between`` what the second function returned
        after the last step.
    """
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as recorded:
        answer = _train(make, warm_ups, steps)
        gc.collect()
    events = _all_events(recorded)
    marks = sorted((event.start_time_ns, event.end_time_ns) for event in events if event.name == _STEP)
    assert len(marks) == steps
    blocks = blocks_of(_allocations(events))
    peaks, ends = zip(*(in_step(blocks, begin, end) for begin, end in marks), strict=True)
    return {"peak": min(peaks), "end": min(ends), "peaks": peaks, "between": answer}


def _train(make: Callable[[], Steps], warm_ups: int, steps: int) -> Any:
    step, between = make()
    for _ in range(warm_ups):
        step()
        between()
    for _ in range(steps):
        with record_function(_STEP):
            step()
        answer = between()
    return answer


def blocks_of(changes: Iterable[Change]) -> list[_Block]:
    """What was given out, from when to when."""
    made: list[_Block] = []
    held: dict[int, _Block] = {}
    addresses: list[int] = []  # of these, ascending
    for time_ns, address, size in sorted(changes):
        place = bisect.bisect_left(addresses, address)
        if size <= 0:
            if address in held:
                block = held.pop(addresses.pop(place))
                block.end, block.seen = time_ns, True
            continue
        if place and addresses[place - 1] + held[addresses[place - 1]].size > address:
            place -= 1
        while place < len(addresses) and addresses[place] < address + size:
            held.pop(addresses.pop(place)).end = time_ns  # given back unseen: there is another one now
        block = _Block(size, time_ns)
        addresses.insert(place, address)
        held[address] = block
        made.append(block)
    return made


def in_step(blocks: list[_Block], begin: int, end: int) -> tuple[int, int]:
    """The highest sum between two moments, and that at the second one, in bytes."""
    changes = []
    for block in blocks:
        if begin <= block.begin <= end or (block.begin < begin < block.end and block.seen):
            changes += [(max(block.begin, begin), block.size), (block.end, -block.size)]
    held = peak = left = 0
    for time_ns, size in sorted(changes):
        held += size
        if time_ns <= end:
            peak, left = max(peak, held), held
    return peak, left


def allocations_in(recorded: Any) -> list[Change]:
    """What the allocator gave out and got back while a profile was recorded."""
    return list(_allocations(_all_events(recorded)))


def times_of(recorded: Any, name: str) -> list[int]:
    """When the events of a name began, in ns."""
    return sorted(event.start_time_ns for event in _all_events(recorded) if event.name == name)


def _allocations(events: list[Any]) -> Iterator[Change]:
    for event in events:
        if event.tag == _EventType.Allocation:
            yield event.start_time_ns, event.typed[1].ptr, event.typed[1].alloc_size


def _all_events(recorded: Any) -> list[Any]:
    return list(_all(recorded.profiler.kineto_results.experimental_event_tree()))


def _all(events: list[Any]) -> Iterator[Any]:
    waiting = list(events)
    while waiting:
        event = waiting.pop()
        yield event
        waiting.extend(event.children)
