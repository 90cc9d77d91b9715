"""Reads training steps out of spans, as what each rank runs, starts and waits for; see `replay`."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence

from axon_nb.records.performance.replay import Call, Item, Key, Recording, Run, Start, Wait
from axon_nb.records.spans import Span

_LABELS = ("gc", "data", "optimizer", "backward", "forward")
"""What a rank may be doing, by what counts first; everything else is its own code."""
_MAX_STEPS, _MAX_SPANS = 8, 1500
"""What is read: this many steps, and fewer if a rank has more spans in them."""
_TINY_BYTES = 4096
_OWN = "own code"


def record_steps(spans: Iterable[Span], members: Mapping[str, Sequence[int]]) -> Recording | None:
    """Return the last steps in which all ranks took part; None: there are none.

    A step ends with its last optimizer step, so two of them are needed.

    Args:
        spans: Spans of all ranks, in any order, on one clock.
        members: Ranks of groups, by name.
    """
    by_rank: dict[int, list[Span]] = {}
    for span in sorted(spans, key=lambda one: one.start_ns):
        by_rank.setdefault(span.rank, []).append(span)
    ends = {rank: list(_step_ends(own)) for rank, own in by_rank.items()}
    count = min((len(own) for own in ends.values()), default=0) - 1
    if count < 1:
        return None
    count = min(count, _MAX_STEPS)
    while count > 1 and max(_num_since(own, ends[rank][-count - 1]) for rank, own in by_rank.items()) > _MAX_SPANS:
        count //= 2
    edges = {rank: own[-count - 1 :] for rank, own in ends.items()}
    fixed_s = _fixed_s(by_rank, members)
    by_rank = {rank: [one for one in own if one.end_ns > edges[rank][0]] for rank, own in by_rank.items()}
    origin = min(own[0] for own in edges.values())
    calls = _calls(by_rank, edges, members)
    return Recording(
        {rank: _items(rank, own, edges[rank], calls) for rank, own in by_rank.items()},
        calls,
        {rank: (own[0] - origin) / 1e9 for rank, own in edges.items()},
        count,
        statistics.fmean((own[-1] - own[0]) / 1e9 for own in edges.values()) / count,
        fixed_s,
    )


def _num_since(spans: Sequence[Span], time_ns: int) -> int:
    return sum(span.end_ns > time_ns for span in spans)


def _fixed_s(by_rank: Mapping[int, Sequence[Span]], members: Mapping[str, Sequence[int]]) -> float | None:
    """Return the median time of all_reduces and barriers that move hardly any data, once their last rank has come."""
    small: dict[Key, dict[int, Span]] = {}
    for rank, spans in by_rank.items():
        for span in spans:
            if span.kind == "collective" and span.name in ("all_reduce", "barrier") and span.bytes <= _TINY_BYTES:
                small.setdefault((span.group, span.sequence), {})[rank] = span
    times = [
        max(one.end_ns for one in own.values()) - max(one.start_ns for one in own.values())
        for key, own in small.items()
        if len(own) > 1 and set(own) == set(members.get(key[0], own))
    ]
    return max(0.0, statistics.median(times) / 1e9) if times else None


def _step_ends(spans: Sequence[Span]) -> Iterator[int]:
    """Yield when each training step of a rank ended: with the last of its optimizers."""
    end = 0
    for span in spans:
        if span.kind == "optimizer":
            end = span.end_ns
        elif span.kind in ("forward", "backward") and end:
            yield end
            end = 0
    if end:
        yield end


def _step_of(edges: Sequence[int], time_ns: int) -> int:
    """Return the step that a time is in; -1: before the first, or after the last."""
    return next((step for step, (a, b) in enumerate(itertools.pairwise(edges)) if a <= time_ns < b), -1)


def _calls(
    by_rank: Mapping[int, Sequence[Span]], edges: Mapping[int, Sequence[int]], members: Mapping[str, Sequence[int]]
) -> dict[Key, Call]:
    """Return the collectives that all their ranks started in the recorded steps."""
    found: dict[Key, dict[int, Span]] = {}
    for rank, spans in by_rank.items():
        for span in spans:
            if span.kind == "collective" and span.sequence and _step_of(edges[rank], span.start_ns) >= 0:
                found.setdefault((span.group, span.sequence), {})[rank] = span
    whole = {key: own for key, own in found.items() if set(own) == set(members.get(key[0], own))}
    calls: dict[Key, Call] = {}
    free: dict[str, int] = {}
    for key in sorted(whole):
        own = whole[key]
        rank, span = next(iter(own.items()))
        begin = max(*(one.start_ns for one in own.values()), free.get(key[0], 0))
        free[key[0]] = max(one.end_ns for one in own.values())
        step = _step_of(edges[rank], span.start_ns)
        backwards = [
            one for one in by_rank[rank] if one.kind == "backward" and _step_of(edges[rank], one.start_ns) == step
        ]
        part = next((n for n, one in enumerate(backwards) if one.start_ns <= span.start_ns <= one.end_ns), -1)
        calls[key] = Call(
            span.name,
            max(one.bytes for one in own.values()),
            {one: max(0, its.end_ns - begin) / 1e9 for one, its in own.items()},
            step,
            _label(by_rank[rank], span.start_ns),
            max(part, 0),
            max(1, len(backwards)),
        )
    return calls


def _label(spans: Sequence[Span], time_ns: int) -> str:
    kinds = {one.kind for one in spans if one.start_ns <= time_ns < one.end_ns and one.kind in _LABELS}
    return min(kinds, key=_LABELS.index, default=_OWN)


def _items(rank: int, spans: Sequence[Span], edges: Sequence[int], calls: Mapping[Key, Call]) -> list[Item]:
    """Return what a rank does in its steps: starts and waits at their times, and runs in between."""
    own = {
        (one.group, one.sequence): one
        for one in spans
        if one.kind == "collective"
        and (one.group, one.sequence) in calls
        and _step_of(edges, one.start_ns) == calls[one.group, one.sequence].step
    }
    events: list[tuple[int, int, int, Item | None]] = []
    events += [(one.start_ns, 0, one.start_ns, Start(key)) for key, one in own.items()]
    waited: set[Key] = set()
    for one in spans:
        if one.kind == "wait" and edges[0] <= one.start_ns < edges[-1]:
            key = (one.group, one.sequence)
            waited.add(key)
            events.append((one.start_ns, 1, one.end_ns, Wait((key,)) if key in own else None))
    rest = {key: one for key, one in own.items() if key not in waited}
    for backward in (one for one in spans if one.kind == "backward"):  # DDP waits in C++, at the end of its backward
        keys = [key for key, one in rest.items() if backward.start_ns <= one.start_ns <= backward.end_ns]
        if keys:
            last = max(rest[key].start_ns for key in keys)
            end = min(max(rest[key].end_ns for key in keys), backward.end_ns)
            events.append((last, 1, max(last, end), Wait(tuple(keys))))
            for key in keys:
                del rest[key]
    events += [(one.start_ns, 1, one.end_ns, Wait((key,))) for key, one in rest.items()]
    items: list[Item] = []
    labelled = [one for one in spans if one.kind in _LABELS]
    now = edges[0]
    for start, _, end, item in sorted(events, key=lambda event: event[:3]):
        items += _runs(labelled, now, min(start, edges[-1]), edges)
        now = max(now, start)
        if item is None:
            items.append(Run("message", max(0, end - now) / 1e9, max(0, _step_of(edges, now))))
            now = max(now, end)
        elif isinstance(item, Wait):
            items.append(item)
            now = max(now, min(end, max(own[key].end_ns for key in item.keys)))
        else:
            items.append(item)
    return [*items, *_runs(labelled, now, edges[-1], edges)]


def _runs(labelled: Sequence[Span], start: int, end: int, edges: Sequence[int]) -> Iterator[Run]:
    """Yield what a rank ran between two times."""
    if end <= start:
        return
    near = [one for one in labelled if one.start_ns < end and one.end_ns > start]
    cuts = {start, end, *(edge for edge in edges if start < edge < end)}
    cuts |= {time for one in near for time in (one.start_ns, one.end_ns) if start < time < end}
    for a, b in itertools.pairwise(sorted(cuts)):
        yield Run(_label(near, a), (b - a) / 1e9, max(0, _step_of(edges, a)))
