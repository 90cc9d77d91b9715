"""Recordings in which other calls move the same data: joined ones, and such as run during the backward."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from axon_nb.records.performance.replay import Call, Item, Key, Recording, Run, Start, Wait

_BUCKET_BYTES, _FIRST_BUCKET_BYTES = 25 << 20, 1 << 20
"""When DDP closes a bucket and sums it, by default."""
_SMALL_BYTES = 1 << 16
"""Up to here, all of a call's time counts as a fixed cost, unless something shows the two apart."""


def fixed_cost(recording: Recording, calls: Sequence[Call]) -> float:
    """Return the seconds that a call takes whatever its size: as one without data, or as a line through time and bytes.

    With calls of one size, the two cannot be told apart; small ones are then taken as all fixed cost.
    """
    sizes, times = [call.num_bytes for call in calls], [call.longest_s for call in calls]
    if recording.fixed_s is not None:
        return min(recording.fixed_s, statistics.median(times))
    if max(sizes) < 1.5 * min(sizes):
        return statistics.median(times) if max(sizes) <= _SMALL_BYTES else 0.0
    _, intercept = statistics.linear_regression(sizes, times)
    return max(0.0, min(intercept, *times))


def merged(recording: Recording, calls: Mapping[Key, Call], fixed_s: float) -> Recording:
    """Return the recording with calls joined in each backward, or in each step: the last one carries all."""
    groups: dict[tuple[object, ...], list[Key]] = {}
    for key in sorted(calls):
        call = calls[key]
        groups.setdefault((key[0], call.step, call.part if call.within == "backward" else -1), []).append(key)
    return _joined(recording, list(groups.values()), fixed_s)


def _joined(recording: Recording, groups: Sequence[Sequence[Key]], fixed_s: float) -> Recording:
    """Return the recording with the calls of each group in its last one; the others are gone."""
    changed = dict(recording.calls)
    for keys in groups:
        own = [recording.calls[key] for key in keys]
        for key in keys[:-1]:
            del changed[key]
        changed[keys[-1]] = replace(
            own[-1],
            num_bytes=sum(call.num_bytes for call in own),
            seconds={
                rank: max(0.0, sum(call.seconds[rank] for call in own) - (len(own) - 1) * fixed_s)
                for rank in own[-1].seconds
            },
        )
    return replace(recording, calls=changed)


def overlapped(recording: Recording, late: Mapping[Key, Call], fixed_s: float) -> Recording:
    """Return the recording with these calls as DDP makes them: in buckets, from the last layer on, in the backward."""
    steps: dict[tuple[str, int], list[Key]] = {}
    for key in sorted(late, reverse=True):  # programs go through parameters from the first on, a backward from the last
        steps.setdefault((key[0], late[key].step), []).append(key)
    buckets = [bucket for keys in steps.values() for bucket in _buckets(keys, late)]
    starts: dict[Key, float] = {}
    for keys in steps.values():
        total, done = sum(late[key].num_bytes for key in keys) or 1, 0
        for key in keys:
            done += late[key].num_bytes
            starts[key] = done / total
    joined = _joined(recording, buckets, fixed_s)
    calls = {key: replace(call, within="backward") if key in late else call for key, call in joined.calls.items()}
    joined = replace(joined, calls=calls)
    items = {rank: _moved(own, joined, starts) for rank, own in recording.items.items()}
    return replace(joined, items=items)


def _buckets(keys: Sequence[Key], calls: Mapping[Key, Call]) -> Iterator[list[Key]]:
    bucket, size, limit = [], 0, _FIRST_BUCKET_BYTES
    for key in keys:
        bucket.append(key)
        size += calls[key].num_bytes
        if size >= limit:
            yield bucket
            bucket, size, limit = [], 0, _BUCKET_BYTES
    if bucket:
        yield bucket


def _moved(items: Sequence[Item], joined: Recording, starts: Mapping[Key, float]) -> list[Item]:
    """Return a rank's items with calls started where their share of the backward before them is done."""
    result: list[Item] = []
    pending: list[Key] = []
    for item in items:
        if isinstance(item, Start) and item.key in starts:
            pending.append(item.key)
        elif not (isinstance(item, Wait) and all(key in starts for key in item.keys)):
            if isinstance(item, Run) and item.label in ("optimizer", "forward") and pending:
                result = _spread(result, [key for key in pending if key in joined.calls], starts)
                pending = []
            result.append(item)
    return _spread(result, [key for key in pending if key in joined.calls], starts) if pending else result


def _spread(items: list[Item], keys: Sequence[Key], starts: Mapping[Key, float]) -> list[Item]:
    """Start calls during the last backward of `items`, each after its share of it, and wait for all at its end."""
    last = max((n for n, item in enumerate(items) if _is_backward(item)), default=len(items) - 1)
    first = last
    while first > 0 and _is_backward(items[first - 1]):
        first -= 1
    runs = [item for item in items[first : last + 1] if isinstance(item, Run)]
    total, step = sum(run.seconds for run in runs), runs[0].step if runs else 0
    spread: list[Item] = []
    for before, key in itertools.pairwise([None, *sorted(keys, key=lambda one: starts[one])]):
        assert key is not None
        share = starts[key] - (starts[before] if before is not None else 0.0)
        spread += [Run("backward", share * total, step), Start(key)]
    return [*items[:first], *spread, Wait(tuple(keys)), *items[last + 1 :]]


def _is_backward(item: Item) -> bool:
    return isinstance(item, Run) and item.label == "backward"
