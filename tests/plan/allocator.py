"""What a training step really takes: the events of the allocator, as torch's profiler records them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch._C._profiler import _EventType
from torch.profiler import ProfilerActivity, profile, record_function

__all__ = ["allocated"]

_STEP = "the measured step"


def allocated(make: Callable[[], tuple[Callable[[], None], Callable[[], Any]]], *, warm_ups: int) -> dict[str, Any]:
    """Bytes that the allocator has given out, at the highest moment of a step and at its end.

    Args:
        make: Makes everything; returns a step up to the optimizer's, and what comes between steps.
        warm_ups: Steps before the one that counts.

    Returns:
        ``peak`` and ``end`` in bytes, and what the second function returned after the measured step.
    """
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as recorded:
        step, between = make()
        for _ in range(warm_ups):
            step()
            between()
        with record_function(_STEP):
            step()
        answer = between()
    events = list(_all(recorded.profiler.kineto_results.experimental_event_tree()))  # type: ignore[union-attr]
    (mark,) = [event for event in events if event.name == _STEP]
    changes = sorted(
        (event.start_time_ns, event.typed[1].alloc_size) for event in events if event.tag == _EventType.Allocation
    )
    held = peak = end = 0
    for time_ns, size in changes:
        held += size
        if time_ns <= mark.end_time_ns:
            end = held
            if time_ns >= mark.start_time_ns:
                peak = max(peak, held)
    assert peak > 0
    return {"peak": peak, "end": end, "between": answer}


def _all(events: list[Any]) -> Iterator[Any]:
    waiting = list(events)
    while waiting:
        event = waiting.pop()
        yield event
        waiting.extend(event.children)
