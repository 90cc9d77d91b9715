"""What a training step really takes: the events of the allocator, as torch's profiler records them."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from torch._C._profiler import _EventType
from torch.profiler import ProfilerActivity, profile, record_function

__all__ = ["allocated"]

_STEP = "a measured step"
_NEVER = 1 << 63
Steps = tuple[Callable[[], None], Callable[[], Any]]


@dataclass
class _Block:
    size: int
    begin: int
    end: int = _NEVER


def allocated(make: Callable[[], Steps], *, warm_ups: int, steps: int = 4) -> dict[str, Any]:
    """Bytes that the allocator has given out, at the highest moment of a step and at its end.

    The profiler does not see what threads of Gloo give back: they are the last to hold a buffer where the rank has let
    go of it sooner. All is given up at the end, so what then is left was given back unseen, in the step in which it
    was made: it does not count in later steps. Of the steps the one counts that had fewest of these.

    Args:
        make: Makes everything; returns a step up to the optimizer's, and what comes between steps.
        warm_ups: Steps before those that count.
        steps: How many count.

    Returns:
        ``peak`` and ``end`` in bytes, and what the second function returned after the last step.
    """
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as recorded:
        answer = _train(make, warm_ups, steps)
        gc.collect()
    events = list(_all(recorded.profiler.kineto_results.experimental_event_tree()))  # type: ignore[union-attr]
    marks = sorted((event.start_time_ns, event.end_time_ns) for event in events if event.name == _STEP)
    assert len(marks) == steps
    blocks = _blocks([event for event in events if event.tag == _EventType.Allocation])
    found = [_in_step(blocks, begin, end) for begin, end in marks]
    return {"peak": min(peak for peak, _ in found), "end": min(left for _, left in found), "between": answer}


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


def _blocks(events: list[Any]) -> list[_Block]:
    made: list[_Block] = []
    held: dict[int, _Block] = {}
    for event in sorted(events, key=lambda event: event.start_time_ns):
        fields = event.typed[1]
        before = held.pop(fields.ptr, None)
        if before is not None:
            before.end = event.start_time_ns  # given back now, or before: there is another one
        if fields.alloc_size > 0:
            held[fields.ptr] = _Block(fields.alloc_size, event.start_time_ns)
            made.append(held[fields.ptr])
    return made


def _in_step(blocks: list[_Block], begin: int, end: int) -> tuple[int, int]:
    """The highest sum of a step, and that at its end."""
    changes = []
    for block in blocks:
        if block.end < begin or block.begin > end or (block.end == _NEVER and block.begin < begin):
            continue
        changes += [(max(block.begin, begin), block.size), (block.end, -block.size)]
    held = peak = left = 0
    for time_ns, size in sorted(changes):
        held += size
        if time_ns <= end:
            peak, left = max(peak, held), held
    return peak, left


def _all(events: list[Any]) -> Iterator[Any]:
    waiting = list(events)
    while waiting:
        event = waiting.pop()
        yield event
        waiting.extend(event.children)
