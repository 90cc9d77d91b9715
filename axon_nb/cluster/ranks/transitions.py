"""The states of a cluster's ranks, and of what replaces them, changes their number or rebuilds their groups.

`transition` takes what can happen to the ranks (events) and returns what `Health`, and whoever carries out a repair or
a resize, does about it (effects). `look` is the same for a rebuild after an aborted cell. Data in, data out, no clock:
the events of a `Story` give the same states again.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from enum import Enum
from typing import Literal

from msgspec import Struct, field
from msgspec.structs import replace

from axon_nb.cluster.failures import REPAIR_HINT
from axon_nb.records.ranks import format_ranks, name_ranks
from axon_nb.records.units import count_of

AGENT_SILENT = "the host agent does not respond, as if it was stopped or swapped out"
_NOT_REBUILT = "the process groups could not be rebuilt"
_TRY_AGAIN = "run `%distributed repair` to try again"
_ATTEMPTS = 3
_PATIENCE_S, _PATIENCE_AFTER_INTERRUPT_S = 10.0, 1.0
"""A host agent that does not reply for this long is stopped or swapped out; ranks cannot rendezvous without it."""
_RESEND_INTERVAL_S = 0.25
_GIVE_UP_S = 10.0
"""Ranks that do not react to the end of an attempt for this long are stuck."""


class Standing(Enum):
    """What is known of a rank's process."""

    ALIVE = "alive"
    STUCK = "stuck in an earlier cell"
    """It did not abort the cell and has not replied since."""
    STARTING = "starting"
    """A new process is forked, and joins."""
    FAILED = "failed to start"
    """The new process has died already."""
    DEAD = "dead"


class Rank(Struct, frozen=True):
    """What is known of a rank."""

    standing: Standing = Standing.ALIVE
    reason: str = ""
    """Why its process died; reads after its name."""
    is_expected: bool = False
    """Whether its death was asked for, and is not announced."""
    lost_context: bool = False
    """Whether it lost its CUDA context, on NCCL: it runs cells but cannot communicate."""


class Step(Enum):
    """A part of a repair or a resize."""

    KILL = "kill"
    SURVEY = "ask the others"
    FORK = "fork"
    FORM = "connect"
    COPY = "copy"
    RETURN = "return to the protected step"
    STAGE = "stage"
    COMMIT = "commit"
    REMOVE = "kill the new ranks"
    """The first of those that undo a change."""
    RELEASE = "release the others"
    REVERT = "return to the old size"
    RECONNECT = "connect again"
    DISABLE = "disable the groups"


_UNDO: Mapping[tuple[str, Step], tuple[Step, ...]] = {
    ("repair", Step.FORK): (Step.REMOVE,),
    ("repair", Step.FORM): (Step.REMOVE, Step.RELEASE, Step.DISABLE),
    **dict.fromkeys(
        [("resize", step) for step in (Step.FORK, Step.FORM, Step.COPY, Step.STAGE)],
        (Step.REMOVE, Step.RELEASE, Step.REVERT, Step.RECONNECT),
    ),
    **dict.fromkeys(
        [(kind, Step.RECONNECT) for kind in ("repair", "resize")],
        (Step.RELEASE, Step.DISABLE),
    ),
}
"""What undoes a change that fails in a step; what is not here is not undone."""


class Change(Struct, frozen=True):
    """A repair or a resize that is in progress."""

    kind: Literal["repair", "resize"]
    new: tuple[int, ...]
    """The ranks that get a new process."""
    steps: tuple[Step, ...]
    """The one that is in progress, and those after it."""
    size: int
    """Of the world, once it is done."""
    source: int | None = None
    """The rank whose variables new ranks get."""
    error: str = ""
    """Why it fails; empty while it does not."""
    failed_in: Step | None = None


class World(Struct, frozen=True):
    """All that is known of a cluster's ranks together."""

    size: int
    ranks: Mapping[int, Rank] = field(default_factory=dict)
    """Those of which more is known than that they are alive. Numbers from `size` on are those that a resize starts."""
    disabled: str = ""
    """Why the process groups of all ranks are disabled; empty if they are not."""
    until_back: bool = False
    """Whether the next cell rebuilds disabled groups, if no rank is missing and the host agent responds."""
    lost: str = ""
    """Why the cluster is gone; reads after its name. Empty while it is there."""
    change: Change | None = None

    def _within(self, *standings: Standing) -> dict[int, Rank]:
        return {rank: one for rank, one in self.ranks.items() if rank < self.size and one.standing in standings}

    @property
    def dead(self) -> dict[int, str]:
        """Why each rank died that has no process, or one that has not joined yet."""
        return {
            rank: one.reason for rank, one in self._within(Standing.DEAD, Standing.STARTING, Standing.FAILED).items()
        }

    @property
    def stuck(self) -> set[int]:
        """Ranks that did not abort an earlier cell and have not replied since."""
        return set(self._within(Standing.STUCK))

    @property
    def lost_contexts(self) -> set[int]:
        """Ranks that lost their CUDA context."""
        return {rank for rank, one in self.ranks.items() if one.lost_context}

    @property
    def missing(self) -> set[int]:
        """Ranks that cannot communicate."""
        return {*self.dead, *self.stuck, *self.lost_contexts}


class Died(Struct, frozen=True):
    """A rank's process is gone; `reason` reads after its name."""

    rank: int
    reason: str
    may_be_old: bool = False
    """Whether it may be the process before the one that is starting."""


class Stuck(Struct, frozen=True):
    """Ranks did not abort a cell."""

    ranks: tuple[int, ...]


class Replied(Struct, frozen=True):
    """Ranks that were stuck are back."""

    ranks: tuple[int, ...]


class ContextsLost(Struct, frozen=True):
    """Ranks lost their CUDA context."""

    ranks: tuple[int, ...]


class Disabled(Struct, frozen=True):
    """The process groups cannot be used."""

    reason: str
    until_back: bool = False


class Enabled(Struct, frozen=True):
    """The process groups were rebuilt."""


class Lost(Struct, frozen=True):
    """The whole cluster is gone; `reason` reads after its name."""

    reason: str


class Repair(Struct, frozen=True):
    """Somebody wants these ranks replaced, and the groups rebuilt."""

    ranks: tuple[int, ...]
    source: int | None = None
    """The rank whose variables they get; None: they start empty, or all return to what is protected."""


class Resize(Struct, frozen=True):
    """Somebody wants another number of ranks."""

    size: int


class Done(Struct, frozen=True):
    """A step of the change is done."""

    step: Step
    interrupted: bool = False
    """Whether the user has interrupted the change."""


class Failed(Struct, frozen=True):
    """A step of the change failed."""

    step: Step
    error: str


Event = Died | Stuck | Replied | ContextsLost | Disabled | Enabled | Lost | Repair | Resize | Done | Failed


class Tell(Struct, frozen=True):
    """Tell the running cells of a death."""

    rank: int
    reason: str


class Announce(Struct, frozen=True):
    """Print a death, unless a cell that runs on the rank reports it."""

    rank: int
    reason: str


class Perform(Struct, frozen=True):
    """Do this step."""

    step: Step


class Ended(Struct, frozen=True):
    """The change is over, or was refused."""

    error: str = ""
    """Why it failed, and what there is now; empty if it did not."""
    refused: bool = False


Effect = Tell | Announce | Perform | Ended
Result = tuple[World, tuple[Effect, ...]]


def transition(world: World, event: Event) -> Result:
    """Return the world after `event`, and the effects that the caller performs, in this order."""
    match event:
        case Died():
            return _die(world, event)
        case Stuck(ranks):
            alive = [rank for rank in ranks if rank not in world.dead]
            return _update(world, alive, standing=Standing.STUCK), ()
        case Replied(ranks):
            return _update(world, world.stuck.intersection(ranks), standing=Standing.ALIVE), ()
        case ContextsLost(ranks):
            return _update(world, [rank for rank in ranks if rank not in world.dead], lost_context=True), ()
        case Disabled(reason, until_back):
            return replace(world, disabled=reason, until_back=until_back), ()
        case Enabled():
            return replace(world, disabled="", until_back=False), ()
        case Lost(reason):
            return replace(world, lost=reason), ()
        case Repair() | Resize():
            return _begin(world, event)
        case Done():
            return _done(world, event)
        case Failed(step, error):
            return _fail(world, step, error)


def _update(world: World, ranks: Iterable[int], **changes: object) -> World:
    changed = {rank: replace(world.ranks.get(rank, Rank()), **changes) for rank in ranks}
    return replace(world, ranks={**world.ranks, **changed}) if changed else world


def _without(world: World, ranks: Iterable[int]) -> World:
    return replace(world, ranks={rank: one for rank, one in world.ranks.items() if rank not in {*ranks}})


def _die(world: World, event: Died) -> Result:
    rank, reason, change = event.rank, event.reason, world.change
    known = world.ranks.get(rank, Rank())
    if known.standing is Standing.STARTING and change is not None and not event.may_be_old:
        error = change.error or f"Rank {rank} failed to start: it {reason}."
        world = replace(world, change=replace(change, error=error))
        return _update(world, [rank], standing=Standing.FAILED, reason=known.reason or reason), ()
    if rank >= world.size:  # it left the world, or never belonged to it
        return world, ()
    if rank in world.dead:
        return world, (Tell(rank, known.reason),)
    announced = () if known.is_expected else (Announce(rank, reason),)
    world = replace(world, ranks={**world.ranks, rank: Rank(Standing.DEAD, reason)})
    return world, (Tell(rank, reason), *announced)


def _begin(world: World, event: Repair | Resize) -> Result:
    if world.change is not None:
        refusal = f"Another {world.change.kind} is in progress: wait until it is done."
        return world, (Ended(refusal, refused=True),)
    if isinstance(event, Repair):
        kill = () if {*event.ranks} <= {*world.dead} else (Step.KILL,)
        last = (Step.COPY,) if event.source is not None else (Step.RETURN,) if event.ranks else ()
        steps = (*kill, Step.SURVEY, Step.FORK, Step.FORM, *last)
        change = Change("repair", event.ranks, steps, world.size, event.source)
    else:
        grown = (Step.FORK, Step.FORM, Step.COPY, Step.STAGE, Step.COMMIT)
        shrunk = (Step.STAGE, Step.FORM, Step.COMMIT)
        new = tuple(range(world.size, event.size))
        change = Change("resize", new, grown if new else shrunk, event.size, 0 if new else None)
    return _enter(replace(world, change=change), change)


def _enter(world: World, change: Change) -> Result:
    """Begin the next step of the change, or end it."""
    if not change.steps:
        return replace(world, change=None), (Ended(_explain(world, change)),)
    step = change.steps[0]
    if step is Step.RECONNECT and world.missing:
        change = replace(change, steps=(Step.DISABLE,))
        step = Step.DISABLE
    world = replace(world, change=change)
    if step is Step.KILL:
        world = _update(world, [rank for rank in change.new if rank not in world.dead], is_expected=True)
    elif step is Step.FORK:
        world = _update(world, change.new, standing=Standing.STARTING, is_expected=False, lost_context=False)
    elif step is Step.COMMIT:  # from here on there is only the new world
        left = range(change.size, world.size)
        world = replace(_without(world, [*change.new, *left]), size=change.size)
    elif step is Step.REMOVE:
        is_repair = change.kind == "repair"
        world = _update(world, change.new, standing=Standing.DEAD) if is_repair else _without(world, change.new)
    elif step is Step.DISABLE:
        world = replace(world, disabled=_describe_failure(world, change))
    return world, (Perform(step),)


def _done(world: World, event: Done) -> Result:
    change = world.change
    assert change is not None
    if change.failed_in is None and (error := _obstacle(world, change, interrupted=event.interrupted)):
        return _fail(world, event.step, error)
    if event.step is Step.FORM and change.kind == "repair":
        world = replace(_without(world, change.new), disabled="", until_back=False)
    return _enter(world, replace(change, steps=change.steps[1:]))


def _obstacle(world: World, change: Change, *, interrupted: bool) -> str:
    """Why the next step must not begin although this one is done; empty: it may."""
    if change.error or change.kind == "repair" or change.steps[0] is Step.COMMIT:
        return change.error
    if world.dead:
        return " ".join(f"Rank {rank} {reason}." for rank, reason in world.dead.items())
    return "The resize was interrupted." if interrupted else ""


def _fail(world: World, step: Step, error: str) -> Result:
    change = world.change
    assert change is not None
    steps = () if world.lost else _UNDO.get((change.kind, step), change.steps[1:] if change.failed_in else ())
    failed_in, error = change.failed_in or step, change.error or error
    return _enter(world, replace(change, steps=steps, failed_in=failed_in, error=error))


def _describe_failure(world: World, change: Change) -> str:
    """Why the groups are disabled after a change that failed."""
    if change.kind == "repair":
        what = f"{name_ranks(change.new)} could not be replaced" if change.new else _NOT_REBUILT
        return f"{what}; {_TRY_AGAIN}"
    what = f"{name_ranks(world.dead)} died during a resize" if world.dead else _NOT_REBUILT
    return f"{what}; run `%distributed repair`"


def _explain(world: World, change: Change) -> str:
    """Say how a change failed, and what there is now; empty if it did not."""
    error, new = change.error, name_ranks(change.new)
    match change.kind, change.failed_in:
        case _, None:
            return ""
        case "repair", Step.FORK | Step.FORM:
            return f"{error} Run `%distributed repair` to try again."
        case "repair", Step.COPY:
            empty = f"the new {'rank is' if len(change.new) == 1 else 'ranks are'} empty"
            return f"Replaced {new}, but failed to copy the variables of rank {change.source}: {empty}. {error}"
        case "repair", Step.RETURN:
            again = f"run `%distributed repair --ranks {format_ranks(change.new)}` to try again"
            return f"Replaced {new}, but failed to return to the last protected step: {again}. {error}"
        case "resize", Step.COMMIT:
            return f"The world has {count_of(world.size, 'rank')} now, but: {error}"
        case "resize", _:
            dead = f"Run `%distributed repair` for {name_ranks(world.dead)}." if world.dead else ""
            kept = dead or "All its ranks keep their state."
            return f"{error} The world still has {count_of(world.size, 'rank')}. {kept}"
    return error


class Rebuild(Struct, frozen=True):
    """How far the rebuild of the groups after an aborted cell is."""

    attempt: int = 0
    started_at: float | None = None
    """When the attempt that is in progress began; None: none is."""
    aborted_at: float = 0.0
    is_done: bool = False


class Look(Struct, frozen=True):
    """What can be seen of a rebuild."""

    at: float
    silent_s: float
    """For how long the host agent has owed a reply."""
    interrupted: bool = False
    """Whether the user waits for the end."""
    waiting: tuple[int, ...] = ()
    """The ranks that have not replied to the attempt."""
    failed: bool = False
    """Whether it failed on one of them."""
    acknowledged: bool = True
    """Whether every abort was acknowledged: a late one would break the rebuilt groups."""
    lost_contexts: tuple[int, ...] = ()
    """The ranks that could not connect because they lost their CUDA context."""


class StartAttempt(Struct, frozen=True):
    """Ask all ranks to connect their groups again."""


class AbortAttempt(Struct, frozen=True):
    """Wake the ranks that wait for one that failed: the next attempt starts when all are idle."""


class Disable(Struct, frozen=True):
    """Disable the groups of these ranks."""

    reason: str
    ranks: tuple[int, ...]
    until_back: bool = False
    warning: str = ""
    """What to print, too."""


class GiveUp(Struct, frozen=True):
    """Record that these ranks are stuck until they reply."""

    ranks: tuple[int, ...]


class LoseContexts(Struct, frozen=True):
    """Record that these ranks lost their CUDA context."""

    ranks: tuple[int, ...]


class Report(Struct, frozen=True):
    """The groups are there again: report what ranks say about it."""


RebuildEffect = StartAttempt | AbortAttempt | Disable | GiveUp | LoseContexts | Report


def look(
    rebuild: Rebuild, world: World, seen: Look, *, attempt_s: float, remedy: str = REPAIR_HINT
) -> tuple[Rebuild, tuple[RebuildEffect, ...]]:
    """Return how far the rebuild is after what is seen, and the effects that the caller performs.

    Args:
        rebuild: How far it was.
        world: What is known of the ranks.
        seen: What can be seen of it.
        attempt_s: How long an attempt may take, in seconds.
        remedy: How to get a dead or stuck rank back.
    """
    done = replace(rebuild, is_done=True)
    if rebuild.is_done or world.lost:
        return done, ()
    ranks = tuple(range(world.size))
    if world.missing:
        remaining = tuple(rank for rank in ranks if rank not in world.missing or rank in world.lost_contexts)
        return done, (Disable(_describe_missing(world, remedy), remaining, until_back=True),)
    abort = (
        () if rebuild.started_at is None or seen.at - rebuild.aborted_at <= _RESEND_INTERVAL_S else (AbortAttempt(),)
    )
    if seen.silent_s > (_PATIENCE_AFTER_INTERRUPT_S if seen.interrupted else _PATIENCE_S):
        reason = f"{AGENT_SILENT}; they are rebuilt with the next cell after it does"
        warning = f"The process groups were not rebuilt: {AGENT_SILENT}."
        return done, (*abort, Disable(reason, ranks, until_back=True, warning=warning))
    if rebuild.started_at is None:
        if world.change is not None:  # its end is near, and it rebuilds them, too
            return rebuild, ()
        if rebuild.attempt == _ATTEMPTS:
            warning = f"{_NOT_REBUILT.capitalize()}. R{_TRY_AGAIN[1:]}."
            return done, (Disable(f"{_NOT_REBUILT}; {_TRY_AGAIN}", ranks, warning=warning),)
        return replace(rebuild, attempt=rebuild.attempt + 1, started_at=seen.at), (StartAttempt(),)
    seconds = seen.at - rebuild.started_at
    is_overdue = seconds > attempt_s + _GIVE_UP_S
    if seen.waiting and is_overdue:
        return rebuild, (GiveUp(seen.waiting),)
    if seen.waiting:
        is_late = bool(abort) and (seen.failed or seconds > attempt_s)
        return (replace(rebuild, aborted_at=seen.at), abort) if is_late else (rebuild, ())
    if not seen.acknowledged and not is_overdue:
        return rebuild, ()
    if seen.failed or not seen.acknowledged:
        return replace(rebuild, started_at=None), ()
    return (rebuild, (LoseContexts(seen.lost_contexts),)) if seen.lost_contexts else (done, (Report(),))


def _describe_missing(world: World, remedy: str) -> str:
    left, parts = world.missing, []
    for known, state in (
        (world.dead, "dead"),
        (world.stuck, "stuck in an earlier cell"),
        (world.lost_contexts, "without a CUDA context"),
    ):
        ranks = left.intersection(known)
        left = left - ranks
        parts += [f"{name_ranks(ranks)} {'is' if len(ranks) == 1 else 'are'} {state}"] if ranks else []
    # Without --ranks, `repair` leaves stuck ranks alone: they may come back.
    option = f" --ranks {format_ranks(world.missing)}" if world.stuck else ""
    pronoun = "it" if len(world.missing) == 1 else "them"
    repair = f"run `%distributed repair{option}` to replace {pronoun}"
    return f"{' and '.join(parts)}; {repair if remedy == REPAIR_HINT else 'run `%distributed restart`'}"


class Entry(Struct, frozen=True):
    """An event of the story, and what came of it."""

    at: float
    """Seconds since the epoch."""
    before: World | Rebuild
    event: Event | Look
    after: World | Rebuild
    effects: tuple[Effect | RebuildEffect, ...]

    def __str__(self) -> str:
        clock = f"{time.strftime('%H:%M:%S', time.localtime(self.at))}{f'{self.at % 1:.3f}'[1:]}"
        then = "".join(f"; {_words(effect)}" for effect in self.effects)
        return f"{clock} {_words(self.event)}{self._changed()}{then}"

    def _changed(self) -> str:
        if not isinstance(self.before, World) or not isinstance(self.after, World):
            return ""
        old, new = self.before.ranks, self.after.ranks
        moved = [
            f"rank {rank} {was.value} → {now.value}"
            for rank in sorted({*old, *new})
            if (was := old.get(rank, Rank()).standing) is not (now := new.get(rank, Rank()).standing)
        ]
        if self.before.size != self.after.size:
            moved.append(f"{self.before.size} → {self.after.size} ranks")
        return f": {', '.join(moved)}" if moved else ""


def _words(record: Struct) -> str:
    words = [type(record).__name__]
    for name in record.__struct_fields__:
        value = getattr(record, name)
        if value is True:
            words.append(name)
        elif isinstance(value, tuple):
            words += [name_ranks(value)] if value else []
        elif isinstance(value, Enum):
            words.append(f"({value.value})")
        elif isinstance(value, int) and value is not False:
            words.append(f"{name} {value}")
        elif isinstance(value, str) and value:
            words.append(value)
    return " ".join(words)
