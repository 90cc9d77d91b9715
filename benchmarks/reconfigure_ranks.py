"""Rank processes of `benchmarks.reconfigure`: three kinds of groups over one store, broken and rebuilt in turn."""

from __future__ import annotations

import faulthandler
import gc
import importlib
import json
import os
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore

from axon_nb.engine.groups import activity
from axon_nb.engine.groups.abort import ABORT, AbortedError, disable_groups
from axon_nb.engine.groups.recoverable import RecoverableGroup
from axon_nb.engine.groups.store import AgentStore
from benchmarks.reconfigured_group import LIMIT, ReconfiguredGroup, reconfigure

__all__ = ["CPU", "Rank", "own_group", "run_rank", "usage"]

CPU = torch.device("cpu")
_LIFE_S = 400
_TRIES = 3


class Rank:
    """One rank: its store, its groups, and collective steps with all others.

    Args:
        rank: This rank.
        size: Number of ranks.
        address: Address of the store.
    """

    def __init__(self, rank: int, size: int, address: str) -> None:
        self.rank, self.size = rank, size
        self.address = address
        self.store = AgentStore(address, timedelta(seconds=120))
        self._meetings = 0
        self._aborts = 0
        self.epoch = 0

    def group(self, kind: type[RecoverableGroup], name: str, ranks: list[int] | None = None) -> RecoverableGroup:
        """Create a group of `ranks`; collective over them."""
        ranks = ranks or list(range(self.size))
        place = ranks.index(self.rank)
        return kind(
            self.store, epoch=0, rank=place, size=len(ranks), timeout=timedelta(minutes=5), name=name,
            global_rank=self.rank,
        )  # fmt: skip

    def meet(self, ranks: int | None = None) -> None:
        """Wait until all ranks (the first `ranks`) have arrived."""
        self._meetings += 1
        place = f"meet{self._meetings}/"
        self.store.set(f"{place}{self.rank}", "1")
        self.store.wait([f"{place}{rank}" for rank in range(ranks or self.size)])

    def timed(self, rebuild: Callable[[int], object]) -> float:
        """Seconds of one rebuild that all ranks start together."""
        self.epoch += 1
        self.meet()
        began = time.monotonic()
        rebuild(self.epoch)
        return time.monotonic() - began

    def is_right(self, group: Any, value: float | None = None) -> bool:
        """Whether two sums over the group are correct; three would need a third thread if any were stuck."""
        expected = value or group.size() * (group.size() + 1) / 2
        for _ in range(_TRIES):
            tensor = torch.full((64,), group.rank() + 1.0)
            group.allreduce([tensor]).wait()
            if tensor.tolist() != [expected] * 64:
                return False
        return True

    def broken_in(self, group: RecoverableGroup, operation: Callable[[], object], *, fails: bool) -> float:
        """Abort the group during `operation`, rebuild and use it; return the seconds since the abort.

        Args:
            group: The group.
            operation: What the rank waits in; not called on the failing rank.
            fails: Whether this rank fails and makes all abort.
        """
        self._aborts += 1
        self.epoch += 1
        key = f"abort{self._aborts}"
        control = threading.Thread(target=self._abort_at, args=(key, group), daemon=True)
        control.start()
        self.meet()
        if fails:
            time.sleep(0.15)  # the others are in the operation by then
            self.store.set(key, repr(time.monotonic()))
        else:
            try:
                operation()
            except (AbortedError, RuntimeError):
                pass
            else:
                raise AssertionError("the operation did not fail")
        control.join(60)
        began = float(self.store.get(key))
        self.meet()  # as the notebook does: all ranks have ended the cell before any group is rebuilt
        disable_groups("")
        activity.clear()
        group.rebuild(self.epoch)
        assert self.is_right(group)
        return time.monotonic() - began

    def _abort_at(self, key: str, group: RecoverableGroup) -> None:
        store = AgentStore(self.address, timedelta(seconds=120))
        store.get(key)
        ABORT.set()
        group.connection_closer()()
        store._sock.close()


def usage() -> dict[str, float]:
    """Threads, file descriptors and resident MiB of this process."""
    gc.collect()
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return {
        "threads": float(status["Threads"]),
        "descriptors": float(len(os.listdir("/proc/self/fd"))),
        "MiB": int(status["VmRSS"].split()[0]) / 1024,
    }


def run_rank(place: str, body: str, rank: str, size: str, address: str, folder: str, arguments: str) -> None:  # noqa: PLR0917 -- a command line
    """Entry point of a rank process: run `body(Rank, **arguments)` of module `place` and write the result to a file."""
    faulthandler.dump_traceback_later(_LIFE_S, exit=True)
    torch.set_num_threads(1)
    me = Rank(int(rank), int(size), address)
    result = getattr(importlib.import_module(place), body)(me, **json.loads(arguments))
    target = Path(folder) / f"{rank}.json"
    target.with_suffix(".part").write_text(json.dumps(result))
    target.with_suffix(".part").rename(target)
    sys.stdout.flush()
    os._exit(0)  # the destructor of a Gloo backend with closed connections hangs


def speed(me: Rank, *, rounds: int) -> dict[str, list[float]]:
    """Seconds for rebuilding a broken group, by arm; the arms alternate."""
    ours = me.group(RecoverableGroup, "ours")
    inside = me.group(ReconfiguredGroup, "inside")
    own = own_group(me)
    seconds: dict[str, list[float]] = {"ours": [], "inside": [], "own": []}
    for number in range(rounds + 2):
        for group in (ours, inside):
            me.meet()
            group.close_connections()
        took = {"ours": me.timed(ours.rebuild), "inside": me.timed(inside.rebuild)}
        took["own"] = me.timed(lambda epoch: _reconfigure_own(me, own, epoch))
        for group in (ours, inside, own):
            assert me.is_right(group)
        if number >= 2:
            for arm, value in took.items():
                seconds[arm].append(value)
    return seconds


def own_group(me: Rank) -> Any:
    """Torch's own default group."""
    store = PrefixStore("own/", me.store)
    dist.init_process_group("gloo", store=store, rank=me.rank, world_size=me.size, enable_reconfigure=True)  # type: ignore[call-arg]
    group = dist.distributed_c10d._get_default_group()
    _reconfigure_own(me, group, 10**6)
    return group


def _reconfigure_own(me: Rank, group: Any, epoch: int) -> None:
    meeting = PrefixStore(f"own{epoch}/", me.store)
    reconfigure(group, meeting, list(range(me.size)), me.rank, uuid=epoch, timeout=LIMIT)


def leaks(me: Rank, *, rounds: int) -> dict[str, list[dict[str, float]]]:
    """Resource usage before and after `rounds` rebuilds, by arm; each group is aborted before each rebuild."""
    used = {}
    arms: dict[str, Any] = {
        "ours": me.group(RecoverableGroup, "ours"),
        "inside": me.group(ReconfiguredGroup, "inside"),
        "own": own_group(me),
    }
    for arm, group in arms.items():
        points = []
        for number in range(rounds + 1):
            if number in (1, rounds):
                points.append(usage())
            if arm == "own":
                me.timed(lambda epoch, group=group: _reconfigure_own(me, group, epoch))
            else:
                me.meet()
                group.close_connections()
                me.timed(group.rebuild)
            assert me.is_right(group)
        used[arm] = points
    return used


def blocked(me: Rank, *, rounds: int) -> dict[str, dict[str, list[float]]]:
    """Seconds from an abort until the group works again, by operation and arm; the arms alternate."""
    arms = {"ours": me.group(RecoverableGroup, "ours"), "inside": me.group(ReconfiguredGroup, "inside")}
    seconds: dict[str, dict[str, list[float]]] = {}
    for name in ("all_reduce", "recv", "send", "reduce_scatter", "three all_reduces begun"):
        took = seconds.setdefault(name, {arm: [] for arm in arms})
        for _ in range(rounds):
            for arm, group in arms.items():
                took[arm].append(me.broken_in(group, _operation(name, me, group), fails=me.rank == 0))
    return seconds


def _operation(name: str, me: Rank, group: Any) -> Callable[[], object]:
    small, large = torch.ones(64), torch.ones(16 << 20)
    parts = [torch.ones(64) for _ in range(me.size)]

    def three() -> None:
        for work in [group.allreduce([torch.ones(64)]) for _ in range(3)]:
            work.wait()

    return {
        "all_reduce": lambda: group.allreduce([small]).wait(),
        "recv": lambda: group.recv([small], 0, 0).wait(),
        "send": lambda: group.send([large], 0, 0).wait(),
        "reduce_scatter": lambda: group.reduce_scatter([small], [parts]).wait(),
        "three all_reduces begun": three,
    }[name]
