"""One torch.distributed for each mock rank: private hooks into torch, all of them.

torch keeps its groups in a module-level object and in a registry of C++. The object is exchanged at each turn, the
registry has a mode in which every thread has its own. `missing()` names what a newer torch no longer has.
"""

from __future__ import annotations

import random
import sys
from typing import Any

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c_api

from axon_nb.torch_api import torch_api

__all__ = ["RankContext", "isolated_threads", "missing"]

c10d = dist.distributed_c10d


def missing() -> list[str]:
    """Names of the hooks that this torch does not have."""
    absent = [name for name in ("_world", "_register_process_group") if not hasattr(c10d, name)]
    absent += [name for name in ("_set_thread_isolation_mode",) if not hasattr(c_api, name)]
    known = set(vars(_World()))
    needed = {name for name, value in vars(c10d._World).items() if isinstance(value, property)}
    return absent + sorted(f"_World.{name}" for name in needed - known)


class _World:
    """torch's own object of this kind reads module globals; this one holds everything itself."""

    def __init__(self) -> None:
        self.default_pg: Any = None
        self.pg_map: dict[Any, Any] = {}
        self.pg_names: dict[Any, str] = {}
        self.pg_group_ranks: dict[Any, dict[int, int]] = {}
        self.pg_backend_config: dict[Any, str] = {}
        self.group_count = 0
        self.tags_to_pg: dict[str, list[Any]] = {}
        self.pg_to_tag: dict[Any, str] = {}
        self.pg_coalesce_state: dict[Any, list[Any]] = {}
        self.comms: list[Any] = []
        self.pg_config_info: list[dict[str, Any]] = []
        vars(self).update({name: kind() for name, kind in torch_api().world_fields.items()})


class RankContext:
    """What a process would have for itself: torch's groups, and the state of the random number generators."""

    def __init__(self) -> None:
        self._world: Any = _World()
        self._random: list[Any] = self._read()
        self._outside: list[Any] = []

    def enter(self) -> None:
        """Put this rank's things in place."""
        self._outside = [c10d._world, self._read()]
        c10d._world = self._world
        self._write(self._random)

    def leave(self) -> None:
        """Take them away again."""
        self._random = self._read()
        c10d._world, before = self._outside
        self._write(before)

    @staticmethod
    def _read() -> list[Any]:
        numpy = sys.modules.get("numpy")
        return [torch.get_rng_state(), random.getstate(), numpy.random.get_state() if numpy else None]

    @staticmethod
    def _write(state: list[Any]) -> None:
        torch.set_rng_state(state[0])
        random.setstate(state[1])
        if state[2] is not None:
            sys.modules["numpy"].random.set_state(state[2])


def isolated_threads(on: bool) -> None:
    """Whether every thread has a registry of groups of its own."""
    c_api._set_thread_isolation_mode(on)  # type: ignore[attr-defined]
