"""Training steps read out of spans, and replayed: what each rank runs and waits for; pipelines and their ideal.

In a replay a rank's own time stays as measured, in its order. A collective ends when the last of its ranks has started
it, the one before it in the group has ended, and its data has moved. So a change of one part shows what it does to all
ranks.

The ideal of a pipeline step is a simulation from given stage times and message delays.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from msgspec import Struct
from msgspec.structs import replace

from axon_nb.records.spans import Span

_LABELS = ("gc", "data", "optimizer", "backward", "forward")
"""What a rank may be doing, by what counts first; everything else is its own code."""
_MAX_STEPS, _MAX_SPANS = 8, 1500
"""What is read: this many steps, and fewer if a rank has more spans in them."""
_TINY_BYTES = 4096
_OWN = "own code"
Key = tuple[str, int]
"""A collective: its group, and its number in the group."""
Action = tuple[str, int, int]
"""F, B, I (input backward) or W (weight backward); stage; microbatch."""
Order = Sequence[Action]
"""The actions of one rank, in order."""
Times = list[tuple[float, float]]
"""Start and end of each action of one rank, in seconds from the start of the step."""
_COMPUTING = ("forward", "backward")
_MAX_TRIED = 8
"""Steps tried per rank, from the last one back: the last may be unfinished on some ranks, or aborted."""


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


class Run(Struct, frozen=True):
    """The rank computes."""

    label: str
    """``forward``, ``backward``, ``optimizer``, ``data``, ``gc``, ``own code``, or ``message``: a send or receive."""
    seconds: float
    step: int
    """Which of the recorded steps, from 0."""


class Start(Struct, frozen=True):
    """The rank starts a collective."""

    key: Key


class Wait(Struct, frozen=True):
    """The rank waits for collectives."""

    keys: tuple[Key, ...]


Item = Run | Start | Wait


class Call(Struct, frozen=True):
    """A collective."""

    name: str
    num_bytes: int
    seconds: Mapping[int, float]
    """By rank: how long it takes once all ranks have started it and the one before it has ended."""
    step: int
    within: str
    """What its ranks were doing: ``backward``, ``forward`` or another label of `Run`."""
    part: int = 0
    """Which of the step's backwards it belongs to, counted from 0."""
    parts: int = 1
    """Number of the step's backwards with collectives."""

    @property
    def longest_s(self) -> float:
        """How long it takes on its slowest rank, in seconds."""
        return max(self.seconds.values())


class Recording(Struct, frozen=True):
    """Some steps of all ranks."""

    items: Mapping[int, Sequence[Item]]
    """What each rank does, in order."""
    calls: Mapping[Key, Call]
    begins: Mapping[int, float]
    """When each rank begins, in seconds from the first."""
    num_steps: int
    measured_s: float
    """Mean length of a step as it was measured."""
    fixed_s: float | None = None
    """How long an all_reduce or barrier with hardly any data takes, in seconds; None: there was none."""

    def replay(self) -> float:
        """Return the mean length of a step in seconds."""
        clocks, places = dict(self.begins), dict.fromkeys(self.items, 0)
        started: dict[Key, dict[int, float]] = {}
        ends: dict[Key, dict[int, float]] = {}
        free: dict[str, float] = {}
        moved = True
        while moved:
            moved = False
            for rank, items in self.items.items():
                while places[rank] < len(items):
                    item = items[places[rank]]
                    if isinstance(item, Run):
                        clocks[rank] += item.seconds
                    elif isinstance(item, Start):
                        if (call := self.calls.get(item.key)) is not None:
                            arrivals = started.setdefault(item.key, {})
                            arrivals[rank] = clocks[rank]
                            if len(arrivals) == len(call.seconds):
                                group = item.key[0]
                                begin = max(*arrivals.values(), free.get(group, 0.0))
                                ends[item.key] = {one: begin + seconds for one, seconds in call.seconds.items()}
                                free[group] = max(ends[item.key].values())
                    else:
                        keys = [key for key in item.keys if key in self.calls]
                        if not all(key in ends for key in keys):
                            break
                        clocks[rank] = max([clocks[rank], *(ends[key][rank] for key in keys)])
                    places[rank] += 1
                    moved = True
        lengths = [clocks[rank] - self.begins[rank] for rank in self.items]
        return sum(lengths) / len(lengths) / self.num_steps

    def with_runs(self, change: Callable[[int, Run], float]) -> Recording:
        """Return the same with other lengths of runs; `change` gets a rank and its run, and returns seconds."""
        return replace(
            self,
            items={
                rank: [replace(item, seconds=change(rank, item)) if isinstance(item, Run) else item for item in items]
                for rank, items in self.items.items()
            },
        )

    def with_calls(self, change: Callable[[Key, Call], float | None]) -> Recording:
        """Return the same with other transfers: `change` returns the factor of their time; None: there is no call."""
        factors = {key: change(key, call) for key, call in self.calls.items()}
        calls = {
            key: replace(self.calls[key], seconds={rank: s * factor for rank, s in self.calls[key].seconds.items()})
            for key, factor in factors.items()
            if factor is not None
        }
        return replace(self, calls=calls)

    def totals(self) -> dict[int, dict[str, float]]:
        """Return the seconds per step that each rank runs, by label."""
        sums: dict[int, dict[str, float]] = {}
        for rank, items in self.items.items():
            own = sums.setdefault(rank, {})
            for item in items:
                if isinstance(item, Run):
                    own[item.label] = own.get(item.label, 0.0) + item.seconds / self.num_steps
        return sums


def simulate_orders(
    orders: Sequence[Order],
    lengths: Mapping[str, Sequence[float]],
    *,
    num_stages: int,
    num_microbatches: int,
    latency_s: Sequence[float] | None = None,
    backward_latency_s: Sequence[float] | None = None,
) -> list[Times]:
    """Compute the times of all actions: each rank runs its actions in order, each as soon as its inputs are there.

    Args:
        orders: Action order of each rank.
        lengths: Seconds per microbatch of each stage, by action; needed for the actions in `orders`.
        num_stages: Number of stages over all ranks.
        num_microbatches: Number of microbatches per batch.
        latency_s: Seconds that a message between adjacent stages takes: one number per boundary, so one fewer than
            stages. Applies between different ranks only; senders do not wait. None for no delay.
        backward_latency_s: The same for messages of backward; None: as those of forward.

    Returns:
        For each rank the times of its actions, in order.

    Raises:
        ValueError: the orders deadlock, or depend on an action that is in none of them.
    """
    count = num_microbatches
    owner = {stage: rank for rank, order in enumerate(orders) for _, stage, _ in order}
    delays = [[0.0] * (num_stages + 1) for _ in range(2)]  # forward and backward, at the boundary before each stage
    latencies = latency_s, latency_s if backward_latency_s is None else backward_latency_s
    for stage_delays, seconds in zip(delays, latencies, strict=True):
        for stage, delay in enumerate(seconds or (), start=1):
            stage_delays[stage] = delay if owner.get(stage) != owner.get(stage - 1) else 0.0
    # End of each forward, then of each backward, by stage and microbatch; negative while unknown.
    half = num_stages * count
    ends = [-1.0] * (2 * half)
    # Actions that depend on another stage: offset of that stage's end, boundary crossed, offset of their own end.
    others = {"F": (-count, 0, 0), "B": (count, 1, half), "I": (count, 1, half)}
    waiting: dict[int, int] = {}
    times: list[Times] = [[] for _ in orders]
    ready = list(range(len(orders)))[::-1]
    while ready:
        rank = ready.pop()
        done = times[rank]
        clock = done[-1][1] if done else 0.0
        for action, stage, microbatch in orders[rank][len(done) :]:
            key, begin = stage * count + microbatch, clock
            if action != "F" and (ends[key] < 0.0 or (action == "W" and ends[key + half] < 0.0)):
                break  # a backward before its own forward waits for itself
            if action in others:
                step, boundary, first = others[action]
                key += first
                if stage != (num_stages - 1 if first else 0):
                    arrived = ends[key + step]
                    if arrived < 0.0:
                        waiting[key + step] = rank
                        break
                    begin = max(begin, arrived + delays[boundary][stage + boundary])
            clock = begin + lengths[action][stage]
            done.append((begin, clock))
            if action in others:
                ends[key] = clock
                if key in waiting:
                    ready.append(waiting.pop(key))
    if any(len(done) < len(order) for done, order in zip(times, orders, strict=True)):
        raise ValueError("pipeline orders deadlock, or depend on an action that is in none of them")
    return times


def spans_from_times(
    orders: Sequence[Order], times: Sequence[Sequence[tuple[float, float]]], *, ranks: Sequence[int] | None = None
) -> list[Span]:
    """Convert simulated actions to spans as real steps record them: rank by rank, starting at 0 ns.

    Args:
        orders: Action order of each rank.
        times: Start and end of its actions in seconds, as returned by `simulate_orders`.
        ranks: The rank of each order; None for 0, 1, 2 ...
    """
    names = range(len(orders)) if ranks is None else ranks
    return [
        Span(
            rank,
            "forward" if action == "F" else "backward",
            action,
            round(begin * 1e9),
            round(end * 1e9),
            stage=stage,
            microbatch=microbatch,
        )
        for rank, order, moments in zip(names, orders, times, strict=True)
        for (action, stage, microbatch), (begin, end) in zip(order, moments, strict=True)
    ]


class PipelineStep(Struct, frozen=True):
    """A measured pipeline step and its ideal: equal stage times and no communication time."""

    group: str
    """Name of the pipeline's process group."""
    measured: tuple[Span, ...]
    """Forwards and backwards of the stages, rank by rank, in order."""
    ideal: tuple[Span, ...]
    """The same actions in the same order, starting at 0 ns."""

    @property
    def bubble(self) -> float:
        """Fraction of time in which ranks did not compute, 0 to 1."""
        return bubble_fraction(self.measured)

    @property
    def ideal_bubble(self) -> float:
        """Bubble fraction of the ideal step, 0 to 1."""
        return bubble_fraction(self.ideal)


def bubble_fraction(spans: Iterable[Span]) -> float:
    """Fraction of time, 0 to 1, in which ranks do not compute between the first forward and the last backward.

    Args:
        spans: Spans of one step on all ranks; only forwards and backwards of stages count.
    """
    computing = [span for span in spans if span.kind in _COMPUTING and span.stage >= 0]
    if not computing:
        return 0.0
    length = max(span.end_ns for span in computing) - min(span.start_ns for span in computing)
    busy = sum(span.end_ns - span.start_ns for span in computing)
    return 1.0 - busy / (length * len({span.rank for span in computing})) if length else 0.0


def play(
    orders: Sequence[Sequence[Action]], lengths: Mapping[str, float], *, ranks: Sequence[int] | None = None
) -> list[Span]:
    """Simulate orders with equal stage times and no communication time.

    Args:
        orders: Action order of each rank.
        lengths: Seconds that an F, B, I and W take.
        ranks: The rank of each order; None for 0, 1, 2 ...

    Returns:
        Spans rank by rank, starting at 0 ns.

    Raises:
        ValueError: the orders deadlock, or depend on an action that is in none of them.
    """
    stages = 1 + max((stage for order in orders for _, stage, _ in order), default=0)
    count = 1 + max((microbatch for order in orders for _, _, microbatch in order), default=0)
    each = {action: (seconds,) * stages for action, seconds in lengths.items()}
    times = simulate_orders(orders, each, num_stages=stages, num_microbatches=count)
    return spans_from_times(orders, times, ranks=ranks)


class _RankStep(Struct, frozen=True):
    """One step on one rank."""

    rank: int
    spans: tuple[Span, ...]
    start_ns: int
    end_ns: int

    def overlap_ns(self, other: _RankStep) -> int:
        """Overlap in time with another step, in nanoseconds; negative if they do not overlap."""
        return min(self.end_ns, other.end_ns) - max(self.start_ns, other.start_ns)


def last_steps(spans: Iterable[Span], *, members: Mapping[str, Iterable[int]] | None = None) -> list[PipelineStep]:
    """Return each pipeline's last training step that is complete on all ranks, with its ideal; newest first.

    The ideal keeps each rank's own order of actions, so the schedule need not be known. Every F takes the median of the
    measured F times, and likewise B, I and W.

    Args:
        spans: Spans of any kind in any order. Spans of one step share a `sequence`; where that is 0, a step ends
            when an action repeats.
        members: Ranks of groups by name: a step must include all of them. Default: all ranks with spans in the group.
    """
    groups: dict[str, dict[int, list[Span]]] = {}
    for span in spans:
        if span.kind in _COMPUTING and span.stage >= 0:
            groups.setdefault(span.group, {}).setdefault(span.rank, []).append(span)
    known = members or {}
    candidates = [_last_step(group, by_rank, set(known.get(group, by_rank))) for group, by_rank in groups.items()]
    steps = [step for step in candidates if step is not None]
    return sorted(steps, key=lambda step: max(span.end_ns for span in step.measured), reverse=True)


def _last_step(group: str, by_rank: Mapping[int, list[Span]], members: set[int]) -> PipelineStep | None:
    parts = {rank: list(_training_steps(rank, spans)) for rank, spans in sorted(by_rank.items())}
    tried = itertools.chain.from_iterable(step[-_MAX_TRIED:] for step in parts.values())
    for step in sorted(tried, key=lambda part: part.end_ns, reverse=True):
        together = [
            match for rank, others in parts.items() if (match := _overlapping_step(step, rank, others)) is not None
        ]
        if not members <= {part.rank for part in together}:
            continue  # a rank has not reported yet, or did not take part
        measured = tuple(span for part in together for span in part.spans)
        if not _is_complete(measured):
            continue
        orders = [[(span.name, span.stage, span.microbatch) for span in part.spans] for part in together]
        try:
            ideal = play(orders, _lengths(measured), ranks=[part.rank for part in together])
        except ValueError:
            continue
        return PipelineStep(group, measured, tuple(ideal))
    return None


def _training_steps(rank: int, spans: Iterable[Span]) -> Iterator[_RankStep]:
    """Training steps of one rank, in order: those with a backward."""
    for part in _split_steps(sorted(spans, key=lambda span: span.start_ns)):
        if any(span.kind == "backward" for span in part):
            yield _RankStep(rank, tuple(part), part[0].start_ns, max(span.end_ns for span in part))


def _split_steps(spans: Iterable[Span]) -> list[list[Span]]:
    steps: list[list[Span]] = []
    seen: set[Action] = set()
    current = -1
    for span in spans:
        action = (span.name, span.stage, span.microbatch)
        # Repetition alone is not enough: if the first spans of a step are lost, all later steps would be split wrongly.
        if span.sequence != current or action in seen:
            steps.append([])
            seen, current = set(), span.sequence
        seen.add(action)
        steps[-1].append(span)
    return steps


def _overlapping_step(step: _RankStep, rank: int, others: Sequence[_RankStep]) -> _RankStep | None:
    """The step of `rank` that overlaps `step` the most; None if none does."""
    if rank == step.rank:
        return step
    best, longest = None, 0
    for part in reversed(others):
        if part.end_ns <= step.start_ns:
            break
        if (overlap := step.overlap_ns(part)) > longest:
            best, longest = part, overlap
    return best


def _is_complete(spans: Sequence[Span]) -> bool:
    """Whether each microbatch passed every stage exactly once forward and once backward."""
    done = [(span.name, span.stage, span.microbatch) for span in spans]
    forwards = {(stage, microbatch) for name, stage, microbatch in done if name == "F"}
    backwards = {(stage, microbatch) for name, stage, microbatch in done if name in ("B", "W")}
    stages, microbatches = {stage for stage, _ in forwards}, {microbatch for _, microbatch in forwards}
    everything = {(stage, microbatch) for stage in range(len(stages)) for microbatch in microbatches}
    return bool(forwards) and len(set(done)) == len(done) and forwards == backwards == everything


def _lengths(spans: Sequence[Span]) -> dict[str, float]:
    names = {span.name for span in spans}
    return {n: statistics.median((s.end_ns - s.start_ns) / 1e9 for s in spans if s.name == n) for n in names}
