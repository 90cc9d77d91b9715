"""Give each mock rank its own torch.distributed state, through private hooks into torch.

torch keeps its groups in a module-level object and in a C++ registry. The object is swapped whenever another rank runs;
the registry has a mode in which each thread has its own. The register lists the hooks as `comm.mock_worlds`.
"""

from __future__ import annotations

import random
import sys
from typing import Any

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c_api

from axon_nb.torch_api import torch_api

c10d = dist.distributed_c10d


def world_problems() -> list[str]:
    """Return the properties of torch's `_World` that ours lacks."""
    known = set(vars(_World()))
    needed = {name for name, value in vars(c10d._World).items() if isinstance(value, property)}
    return sorted(f"torch.distributed.distributed_c10d._World.{name}" for name in needed - known)


class _World:
    """Replaces torch's own `_World`, which reads module globals; this one holds all state itself."""

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
    """The per-process state of one rank: torch's groups and the random number generators."""

    def __init__(self) -> None:
        self._world: Any = _World()
        self._random: list[Any] = self._read()
        self._caller_state: list[Any] = []

    def enter(self) -> None:
        """Install this rank's state."""
        self._caller_state = [c10d._world, self._read()]
        c10d._world = self._world
        self._write(self._random)

    def leave(self) -> None:
        """Save this rank's state and restore the previous one."""
        self._random = self._read()
        c10d._world, before = self._caller_state
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


def set_thread_isolation(on: bool) -> None:
    """Choose whether each thread has its own registry of groups."""
    c_api._set_thread_isolation_mode(on)  # type: ignore[attr-defined]
