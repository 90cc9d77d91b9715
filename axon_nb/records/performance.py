"""What would shorten a training step: rules that each change one part of a recording; its replay says by how much.

In some recordings other calls move the same data: joined ones, and such as run during the backward.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence

from msgspec import Struct
from msgspec.structs import replace

from axon_nb.records.spans import Span
from axon_nb.records.training.steps import Call, Item, Key, PipelineStep, Recording, Run, Start, Wait
from axon_nb.records.units import format_bytes

_Found = tuple[str, str, str, Recording]
"""Cause, claim, change, and what would have been recorded with it."""
_Rule = Callable[[Recording], Iterator[_Found]]
_MIN_GAIN, _MIN_OWN_GAIN = 0.05, 0.1
"""Share of a step from which a change is worth saying; and if the cause is code that all ranks run, which they need."""
_SMALL_BYTES = 1 << 20
"""Mean payload below which collectives count as small."""
_SAME = 0.02
"""Gains that differ by less are ordered by how easy the change is: in the order of the rules."""
_OWN = "own code"
_LATE = {
    "data": ("waits for its data", "Give each rank data that loads equally fast, or more `num_workers`."),
    "gc": ("collects garbage", "Run `gc.disable()` before the loop, and `gc.collect()` on all ranks every 100 steps."),
    "optimizer": ("takes longer in its optimizer step", "Shard parameters evenly over the ranks."),
    _OWN: ("runs code of its own", "Move what one rank does alone, such as logging or saving, out of the step."),
}
_UNEVEN = (
    "computes longer",
    "Give each rank equally much to compute: `drop_last=True`, batches of equal length, or a faster device.",
)
_BUCKET_BYTES, _FIRST_BUCKET_BYTES = 25 << 20, 1 << 20
"""When DDP closes a bucket and sums it, by default."""
_FIXED_COST_BYTES = 1 << 16
"""Up to here, all of a call's time counts as a fixed cost, unless something shows the two apart."""


class Advice(Struct, frozen=True):
    """One change, and what it saves."""

    cause: str
    """What costs, such as ``straggler``."""
    claim: str
    """The same as a sentence, with its figures."""
    change: str
    """What to do, as a sentence."""
    gain: float
    """Share of the step that it saves, 0 to 1, by the replay."""
    changed: Recording | None = None
    """What would be recorded with it; None: the gain comes from a pipeline's schedule."""

    def __str__(self) -> str:
        return f"{self.claim} {self.change} A step takes {self.gain:.0%} less then."


def advise(recording: Recording, pipelines: Sequence[PipelineStep] = ()) -> list[Advice]:
    """Return what would shorten the step by 5 % or more, most first; each gain is that of one change alone.

    Args:
        recording: The steps.
        pipelines: The last step of each pipeline.
    """
    base = recording.replay()
    found = [(-round(one.gain / _SAME), -1, one) for step in pipelines for one in _pipeline(recording, step)]
    for place, rule in enumerate(_RULES):
        for cause, claim, change, changed in rule(recording):
            gain = 1 - changed.replay() / base if base else 0.0
            if gain >= (_MIN_OWN_GAIN if cause == _OWN else _MIN_GAIN):
                found.append((-round(gain / _SAME), place, Advice(cause, claim, change, gain, changed)))
    return [advice for *_, advice in sorted(found, key=lambda one: one[:2])]


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms"


def _straggler(recording: Recording) -> Iterator[_Found]:
    """One rank runs longer than the others, which wait for it."""
    totals = recording.totals()
    if len(totals) < 2:
        return
    worst = max(totals, key=lambda rank: sum(totals[rank].values()))
    others = [own for rank, own in totals.items() if rank != worst]
    usual = {label: statistics.median(own.get(label, 0.0) for own in others) for label in totals[worst]}
    more = {label: seconds - usual[label] for label, seconds in totals[worst].items() if label != "message"}
    label = max(more, key=lambda one: more[one], default="")
    if not label or more[label] <= 0 or not _is_mostly_last(recording, worst):
        return

    def usual_length(rank: int, run: Run) -> float:
        own = totals[worst].get(run.label, 0.0)
        is_more = rank == worst and run.label != "message" and own > usual[run.label]
        return run.seconds * usual[run.label] / own if is_more else run.seconds

    what, change = _LATE.get(label, _UNEVEN)
    claim = f"Rank {worst} is a straggler: it {what}, {_ms(sum(max(0.0, s) for s in more.values()))} more per step."
    yield f"straggler: {label}", claim, change, recording.with_runs(usual_length)


def _is_mostly_last(recording: Recording, rank: int) -> bool:
    """Whether a rank runs longest in three of four steps: in others, another one was disturbed."""
    sums = [dict.fromkeys(recording.items, 0.0) for _ in range(recording.num_steps)]
    for one, items in recording.items.items():
        for item in items:
            if isinstance(item, Run) and item.label != "message":
                sums[item.step][one] += item.seconds
    return sum(max(own, key=lambda one: own[one]) == rank for own in sums) >= 0.75 * recording.num_steps


def _without(recording: Recording, label: str) -> tuple[float, Recording]:
    """Return the seconds per step that every rank spends with something, and the recording without them."""
    spent = {rank: own.get(label, 0.0) for rank, own in recording.totals().items()}
    common = min(spent.values())

    def rest(rank: int, run: Run) -> float:
        return run.seconds * (1 - common / spent[rank]) if run.label == label and spent[rank] else run.seconds

    return common, recording.with_runs(rest)


def _data(recording: Recording) -> Iterator[_Found]:
    seconds, without = _without(recording, "data")
    change = (
        "Load in the background: `DataLoader(…, num_workers=2, persistent_workers=True)`, more if that is not enough."
    )
    yield "data loading", f"Ranks wait {_ms(seconds)} per step for their DataLoader.", change, without


def _garbage(recording: Recording) -> Iterator[_Found]:
    seconds, without = _without(recording, "gc")
    yield (
        "garbage collection",
        f"Python collects garbage for {_ms(seconds)} per step and rank.",
        _LATE["gc"][1],
        without,
    )


def _own_code(recording: Recording) -> Iterator[_Found]:
    seconds, without = _without(recording, _OWN)
    change = "Do it less often, or on another thread: logging, metrics, saving, preparing batches."
    yield "own code", f"Ranks run code of their own for {_ms(seconds)} per step.", change, without


def _no_sync(recording: Recording) -> Iterator[_Found]:
    """Gradients are summed after each backward of a step, though only the last sum is needed."""
    sums = [call for call in recording.calls.values() if call.name == "all_reduce" and call.within == "backward"]
    parts = {call.part for call in sums}
    if len(parts) < 2:
        return
    change = "Accumulate under `with model.no_sync():` in all backwards of a step but the last."
    without = recording.with_calls(
        lambda _, call: (
            None if call.name == "all_reduce" and call.within == "backward" and call.part < call.parts - 1 else 1.0
        )
    )
    yield "no_sync", f"Gradients are summed in {len(parts)} backwards of each step.", change, without


def _resharding(recording: Recording) -> Iterator[_Found]:
    """Parameters are gathered for the forward, dropped, and gathered again for the backward."""
    gathers = [call for call in recording.calls.values() if call.name.startswith("all_gather")]
    again = [call for call in gathers if call.within == "backward"]
    if not again or not any(call.within == "forward" for call in gathers):
        return
    size = format_bytes(round(sum(call.num_bytes for call in again) / recording.num_steps))
    without = recording.with_calls(
        lambda _, call: None if call.within == "backward" and call.name.startswith("all_gather") else 1.0
    )
    change = f"Keep them: `fully_shard(…, reshard_after_forward=False)`, if each rank has {size} to spare."
    yield "resharding", f"Backwards gather {size} of parameters again per step.", change, without


def _small_calls(recording: Recording) -> Iterator[_Found]:
    """Many small collectives in a row, each of which costs a round trip."""
    small = {
        key: call for key, call in recording.calls.items() if call.name == "all_reduce" and call.within != "forward"
    }
    if len(small) < 4 * recording.num_steps or _mean_bytes(small) > _SMALL_BYTES:
        return
    fixed, count = fixed_cost(recording, list(small.values())), round(len(small) / recording.num_steps)
    is_ddp = all(call.within == "backward" for call in small.values())
    change = (
        "Raise DDP's `bucket_cap_mb` to 25 or more."
        if is_ddp
        else "Join their tensors, or let DDP do it: it sums gradients in buckets of 25 MiB."
    )
    size = format_bytes(round(_mean_bytes(small)))
    yield (
        "small buckets",
        f"Each step has {count} all_reduce calls of {size} on average.",
        change,
        merged(recording, small, fixed),
    )


def _mean_bytes(calls: Mapping[Key, Call]) -> float:
    return statistics.fmean(call.num_bytes for call in calls.values())


def _exposed(recording: Recording) -> Iterator[_Found]:
    """Gradients are summed after the backward, where nothing hides it."""
    late = {
        key: call
        for key, call in recording.calls.items()
        if call.name in ("all_reduce", "reduce_scatter_single") and call.within == _OWN
    }
    if not late:
        return
    seconds = sum(call.longest_s for call in late.values()) / recording.num_steps
    changed = overlapped(recording, late, fixed_cost(recording, list(late.values())))
    claim = f"Ranks compute nothing for {_ms(seconds)} per step while collectives run after the backward."
    yield "exposed communication", claim, "Wrap the model in DDP, which sums gradients during the backward.", changed


def _half_the_bytes(recording: Recording) -> Iterator[_Found]:
    """DDP's sums take longer than the backward that hides them."""
    sums = [call for call in recording.calls.values() if call.name == "all_reduce" and call.within == "backward"]
    if not sums or max(call.num_bytes for call in sums) < _SMALL_BYTES // 16:
        return
    fixed = fixed_cost(recording, sums)
    halved = recording.with_calls(
        lambda _, call: (
            0.5 + 0.5 * min(1.0, fixed / call.longest_s)
            if call.name == "all_reduce" and call.within == "backward" and call.longest_s
            else 1.0
        )
    )
    size = format_bytes(round(sum(call.num_bytes for call in sums) / recording.num_steps))
    change = "Halve the bytes: `model.register_comm_hook(None, fp16_compress_hook)`, or `bf16_compress_hook` on NCCL."
    yield "communication", f"Each step sums {size} of gradients, longer than the backward hides.", change, halved


def _pipeline(recording: Recording, step: PipelineStep) -> Iterator[Advice]:
    """The ranks of a pipeline idle: because stages are uneven or messages slow, or as its schedule makes them."""

    def seconds(spans: Sequence[Span]) -> float:
        return (max(span.end_ns for span in spans) - min(span.start_ns for span in spans)) / 1e9

    share = min(1.0, seconds(step.measured) / recording.measured_s)
    above = share * (1 - seconds(step.ideal) / seconds(step.measured))
    times: dict[int, float] = {}
    for span in step.measured:
        times[span.stage] = times.get(span.stage, 0.0) + (span.end_ns - span.start_ns) / 1e9
    slowest = max(times, key=lambda stage: times[stage])
    if above >= _MIN_GAIN:
        text = f"The pipeline is uneven: stage {slowest} computes {_ms(times[slowest])} per step, the others "
        text += f"{_ms(statistics.fmean(own for stage, own in times.items() if stage != slowest))}."
        yield Advice("uneven stages", text, "Move layers from it to the other stages.", above)
    count = len({span.microbatch for span in step.measured})
    if (gain := share * (1 - above / share) * step.ideal_bubble / 2) >= _MIN_GAIN:
        text = f"A pipeline's ranks idle for {step.bubble:.0%} of its step, {step.ideal_bubble:.0%} by its schedule."
        yield Advice("bubble", text, f"Split the batch into {2 * count} microbatches instead of {count}.", gain)


_RULES: tuple[_Rule, ...] = (
    _straggler,
    _data,
    _garbage,
    _no_sync,
    _small_calls,
    _exposed,
    _resharding,
    _half_the_bytes,
    _own_code,
)
"""Those whose change is easier come first."""


def fixed_cost(recording: Recording, calls: Sequence[Call]) -> float:
    """Return the seconds that a call takes whatever its size: as one without data, or as a line through time and bytes.

    With calls of one size, the two cannot be told apart; small ones are then taken as all fixed cost.
    """
    sizes, times = [call.num_bytes for call in calls], [call.longest_s for call in calls]
    if recording.fixed_s is not None:
        return min(recording.fixed_s, statistics.median(times))
    if max(sizes) < 1.5 * min(sizes):
        return statistics.median(times) if max(sizes) <= _FIXED_COST_BYTES else 0.0
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
