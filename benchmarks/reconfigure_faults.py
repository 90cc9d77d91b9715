"""Faults that `benchmarks.reconfigure` injects besides aborts: late, absent and dead ranks, aborts while rebuilding."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
from torch._C._distributed_c10d import PrefixStore

from axon_nb.engine.groups.abort import ABORT, AbortedError, disable_groups
from axon_nb.engine.groups.recoverable import RecoverableGroup
from axon_nb.engine.groups.store import AgentStore, skip_rendezvous
from benchmarks.reconfigure_ranks import CPU, Rank, own_group
from benchmarks.reconfigured_group import ReconfiguredGroup, reconfigure

__all__ = ["aborts_at_random", "absent", "killed", "late", "late_close", "many", "resized", "stuck", "timed_out"]

ARMS: dict[str, type[RecoverableGroup]] = {"ours": RecoverableGroup, "inside": ReconfiguredGroup}
_STALL_S = 6.0
Outcome = dict[str, Any]


def _begin(me: Rank) -> int:
    disable_groups("")
    me.epoch += 1
    me.meet()
    return me.epoch


def _tried(action: Callable[[], object]) -> str:
    try:
        action()
    except (AbortedError, RuntimeError) as error:
        return f"{type(error).__name__}: {str(error).splitlines()[0][:110]}"
    return "ok"


def late(me: Rank, *, seconds: float) -> Outcome:
    """The last rank arrives `seconds` later than the others."""
    out = {}
    for arm, kind in ARMS.items():
        group = me.group(kind, arm)
        epoch = _begin(me)
        if me.rank == me.size - 1:
            time.sleep(seconds)
        began = time.monotonic()
        result = _tried(lambda group=group, epoch=epoch: group.rebuild(epoch))
        out[arm] = {"seconds": time.monotonic() - began, "result": result, "right": me.is_right(group)}
    return out


class _StallingStore(AgentStore):
    """A store that stalls when the rank waits for what others write."""

    stalled = ""
    """Stalls once, on a key that contains this."""

    def _wait_for(self, keys: Any, timeout: timedelta) -> list[bytes]:
        if self.stalled and any(self.stalled in str(key) for key in keys):
            self.stalled = ""
            time.sleep(_STALL_S)
        return super()._wait_for(keys, timeout)


def absent(me: Rank, *, where: str) -> Outcome:
    """An abort arrives while the group is being built without the last rank; then all ranks rebuild it.

    Args:
        me: This rank.
        where: ``store``: the rank never arrives; ``connecting``: its address is known, but it does not connect.
    """
    if where == "connecting" and me.rank == me.size - 1:
        me.store = _StallingStore(me.address, timedelta(seconds=120))
    out: Outcome = {}
    for arm, kind in ARMS.items():
        group = me.group(kind, arm)
        epoch = _begin(me)
        timer = threading.Timer(1.0, ABORT.set)
        began = time.monotonic()
        result = ""
        if me.rank == me.size - 1 and where == "connecting":
            me.store.stalled = {"ours": f"epoch{epoch}/ours/", "inside": "reconfigure/"}[arm]  # type: ignore[attr-defined]
            timer.start()
            result = _tried(lambda group=group, epoch=epoch: group.rebuild(epoch))
        elif me.rank != me.size - 1:
            timer.start()
            result = _tried(lambda group=group, epoch=epoch: group.rebuild(epoch))
        ended = time.monotonic() - began
        if timer.is_alive():
            timer.join()
        busy = 0.0
        if arm == "inside":
            group.is_idle(45)  # type: ignore[attr-defined]
            busy = max(0.0, time.monotonic() - began - max(ended, 1.0))
        epoch = _begin(me)
        again = time.monotonic()
        repeated = _tried(lambda group=group, epoch=epoch: group.rebuild(epoch))
        out[arm] = {
            "result": result, "seconds": ended, "then in C++ for": busy, "again": repeated,
            "again in": time.monotonic() - again, "right": me.is_right(group),
        }  # fmt: skip
    return out


def timed_out(me: Rank, *, seconds: float) -> Outcome:
    """A rebuild by torch times out; retry with the same number, then with a new one."""
    group = me.group(ReconfiguredGroup, "inside")
    backend: Any = group._inner._get_backend(CPU)
    out: Outcome = {}
    ranks = list(range(me.size))

    def attempt(name: str, uuid: int, *, comes: bool) -> None:
        me.meet()
        handle = PrefixStore(f"{name}/", me.store)
        began = time.monotonic()
        if comes:
            limit = timedelta(seconds=seconds)
            result = _tried(lambda: reconfigure(backend, handle, ranks, me.rank, uuid=uuid, timeout=limit))
        else:
            handle.set(f"handle{me.rank}", backend.get_reconfigure_handle())
            result = "not there"
        out[name] = {"result": result, "seconds": time.monotonic() - began, "handle": backend.get_reconfigure_handle()}

    attempt("one is absent", 50, comes=me.rank != me.size - 1)
    out["the old connections"] = str(_tried(lambda: me.is_right(group)))
    attempt("the same number", 50, comes=True)
    attempt("a new number", 51, comes=True)
    out["right"] = me.is_right(group)
    return out


def late_close(me: Rank) -> Outcome:
    """An abort that was prepared before the group was rebuilt runs afterwards."""
    out: Outcome = {}
    for arm, kind in ARMS.items():
        group = me.group(kind, arm)
        connection_closer = group.connection_closer()
        epoch = _begin(me)
        group.rebuild(epoch)
        me.meet()
        if me.rank == 0:
            connection_closer()
        me.meet()
        out[arm] = _tried(lambda group=group: me.is_right(group))
        group.close_connections()
    return out


def killed(me: Rank) -> Outcome:
    """The second-to-last rank is killed in a collective; the last process replaces it."""
    members = me.size - 1
    newcomer, victim = me.rank == members, members - 1
    out: Outcome = {}
    rank, me.size = me.rank, members
    if newcomer:
        me.rank = victim
        me._meetings = 1  # those before
        me.store.get("killed")
        for arm, kind in ARMS.items():
            group = kind.__new__(kind)
            me.epoch = 1
            with skip_rendezvous():
                kind.__init__(
                    group, me.store, epoch=1, rank=victim, size=members, timeout=timedelta(minutes=5), name=arm,
                    global_rank=victim,
                )  # fmt: skip
            out[arm] = {"right": me.is_right(group)}
        return out
    groups = {arm: me.group(kind, arm) for arm, kind in ARMS.items()}
    me.meet()
    if rank == victim:
        me.store.set("killed", "1")
        os.kill(os.getpid(), signal.SIGKILL)
    began = time.monotonic()
    for arm, group in groups.items():
        tensor = torch.ones(64)
        threading.Timer(
            0.2, group.connection_closer()
        ).start()  # as an abort does; not every rank sees that its peer is gone
        out[arm] = {"in the collective": _tried(lambda group=group, tensor=tensor: group.allreduce([tensor]).wait())}
    out["reported in"] = time.monotonic() - began
    for arm, group in groups.items():
        began = time.monotonic()
        result = _tried(lambda group=group: group.rebuild(1))
        out[arm] |= {"again": result, "again in": time.monotonic() - began, "right": me.is_right(group)}
    return out


def many(me: Rank, *, rounds: int) -> dict[str, list[float]]:
    """Seconds for building five groups, four of them on a subset of ranks; the arms alternate."""
    members = [list(range(me.size)), [0, 1], [2, 3], [1, 2], [0, 2, 3]]
    groups = {
        arm: [me.group(kind, f"{arm}{i}", ranks) for i, ranks in enumerate(members) if me.rank in ranks]
        for arm, kind in ARMS.items()
    }
    seconds: dict[str, list[float]] = {arm: [] for arm in groups}
    for _ in range(rounds):
        for arm, own in groups.items():
            me.meet()
            for group in own:
                group.close_connections()
            seconds[arm].append(me.timed(lambda epoch, own=own: [group.rebuild(epoch) for group in own]))
            assert all(me.is_right(group) for group in own)
    return seconds


def resized(me: Rank) -> Outcome:
    """Shrink the group by its last rank, then grow it again: torch's own group, and our wrapper's inner one."""
    out: Outcome = {}
    own = own_group(me)
    shell = me.group(ReconfiguredGroup, "inside")
    inner: Any = shell._inner
    for arm, group, target in (("own", own, own), ("inside", inner, inner._get_backend(CPU))):
        sizes = []
        for number, size in enumerate((me.size - 1, me.size)):
            name = f"{arm}{number}"
            me.meet()
            began = time.monotonic()
            if me.rank < size:
                meeting = PrefixStore(f"{name}/", me.store)
                limit = timedelta(seconds=20)
                reconfigure(target, meeting, list(range(size)), me.rank, uuid=700 + number, timeout=limit)
                tensor = torch.ones(1)
                group.allreduce([tensor]).wait()
                took = time.monotonic() - began
                said = {"backend": target.size(), "group": group.size(), "sum": tensor.item(), "seconds": took}
                sizes.append({"asked for": size, **said})
        out[arm] = sizes
    return out


def stuck(me: Rank, *, count: int) -> Outcome:
    """A torch group with `count` collectives that never finish, aborted and rebuilt by torch alone."""
    own = own_group(me)
    works = []
    if me.rank:
        works = [own.allreduce([torch.ones(64)]) for _ in range(count)]
    time.sleep(0.3)
    me.meet()
    own.abort()
    time.sleep(0.5)
    out: Outcome = {"released by abort": sum(work.is_completed() for work in works)}
    began = time.monotonic()
    meeting = PrefixStore("again/", me.store)
    ranks = list(range(me.size))
    out["again"] = _tried(lambda: reconfigure(own, meeting, ranks, me.rank, uuid=77, timeout=timedelta(seconds=10)))
    out["again in"] = time.monotonic() - began
    time.sleep(1.0)
    out["released by the rebuild"] = sum(work.is_completed() for work in works)
    out["of"] = len(works)
    tensor = torch.full((64,), me.rank + 1.0)
    out["used"] = _tried(lambda: own.allreduce([tensor]).wait(timedelta(seconds=5)))
    out["right"] = tensor[0].item() == me.size * (me.size + 1) / 2
    me.meet()
    return out


def aborts_at_random(me: Rank, *, arm: str, rounds: int) -> Outcome:
    """Aborts at random moments of a rebuild: how often it completes, and whether a later one always succeeds."""
    group = me.group(ARMS[arm], arm)
    dice = random.Random(me.rank)
    wrong = fresh = 0
    results: Counter[str] = Counter()
    repeats: list[float] = []
    longest = 0.0
    for _ in range(rounds):
        epoch = _begin(me)

        def abort(delay: float = dice.random() * 0.03) -> None:
            time.sleep(delay)
            ABORT.set()
            group.connection_closer()()

        thread = threading.Thread(target=abort, daemon=True)
        thread.start()
        began = time.monotonic()
        result = _tried(lambda epoch=epoch: group.rebuild(epoch))
        results[result[:140]] += 1
        longest = max(longest, time.monotonic() - began)
        thread.join(30)
        before = group._inner
        epoch = _begin(me)
        began = time.monotonic()
        group.rebuild(epoch)
        repeats.append(time.monotonic() - began)
        fresh += before is not group._inner
        wrong += not me.is_right(group)
    return {
        "results": dict(results), "longest": longest, "wrong": wrong, "replaced": fresh, "rounds": rounds,
        "again in": sorted(repeats)[rounds // 2], "again in at most": max(repeats),
    }  # fmt: skip
