"""The ranks that wait to be forked, and the modules that are imported first so that forked ranks already have them."""

from __future__ import annotations

import gc
import importlib
import os
import traceback
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from axon_nb.host.children import Children
from axon_nb.host.deaths import LastOutput
from axon_nb.host.fork import ForkRequest, become_rank, exit_mark, signals_blocked
from axon_nb.host.resources.kept_memory import KeptMemory
from axon_nb.records.protocol.agent import Fork, Forked, failure
from axon_nb.records.protocol.wire import encode

_REQUIRED = (
    "torch",
    "torch.distributed",
    "ipykernel.ipkernel",
    "ipykernel.displayhook",
    "ipyparallel.engine.app",
    "ipyparallel.engine.kernel",
    "axon_nb.engine.bootstrap",
)
# Imported while the agent is idle. The first optimizer alone makes a rank import torch._dynamo, which takes
# longer than everything else together, and four ranks would do it at once.
_OPTIONAL = (
    "IPython.extensions.storemagic",
    "IPython.core.completer",
    "psutil",
    "numpy.random",
    "torch._dynamo",
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
    "torch.utils.data",
)  # not matplotlib's inline backend: it shows figures only in a shell that exists when it is imported
MODULES = (*_REQUIRED, *_OPTIONAL)
"""What an agent imports for its ranks."""


class _Preload:
    """Imports modules step by step; a failing import is left to the rank, which reports it where it uses the module."""

    def __init__(self, *, enabled: bool) -> None:
        self._required = list(_REQUIRED) if enabled else []
        self._optional = list(_OPTIONAL) if enabled else []

    @property
    def ready(self) -> bool:
        """Whether ranks can be forked."""
        return not self._required

    @property
    def done(self) -> bool:
        """Whether everything is imported, including the optional modules."""
        return not self._required and not self._optional

    def step(self, *, busy: bool) -> bool:
        """Import the next module, optional ones only while not `busy`; return whether there was one to import."""
        if self._required:
            name = self._required.pop(0)
        elif self._optional and not busy:
            name = self._optional.pop(0)
        else:
            return False
        gc.disable()  # nearly all of what an import makes stays; to look it through takes a fifth of the time
        try:
            importlib.import_module(name)
        except Exception:
            traceback.print_exc()
        finally:
            gc.enable()
        if not self._required and name == _REQUIRED[-1]:
            gc.collect()
        return True


class ForkQueue:
    """Forks ranks, as soon as the modules that they need are imported.

    Args:
        entry: What ranks run, as `module:function`; empty: this agent forks none.
        children: Gets the new processes.
        last_output: Notes where their output begins.
        inherited: Returns what a new process closes.
    """

    def __init__(
        self,
        entry: str,
        children: Children,
        last_output: LastOutput,
        inherited: Callable[[], Iterable[Any]],
    ) -> None:
        self._entry = entry
        self._children = children
        self._last_output = last_output
        self._inherited = inherited
        self._preload = _Preload(enabled=bool(entry))
        self._kept_memory = KeptMemory()
        self._waiting: list[tuple[Fork, Callable[[Mapping[str, Any]], None]]] = []

    @property
    def ready(self) -> bool:
        """Whether ranks can be forked."""
        return self._preload.ready

    @property
    def idle(self) -> bool:
        """Whether everything is imported, including the optional modules."""
        return self._preload.done

    def put(self, command: Fork, reply: Callable[[Mapping[str, Any]], None]) -> None:
        """Fork a rank when that is possible, then call `reply` with the fields of the answer."""
        self._waiting.append((command, reply))

    def step(self, *, busy: bool) -> bool:
        """Import the next module, or fork the ranks that wait; return whether there is nothing left to import now.

        Args:
            busy: Whether there are ranks: what they may never need is not imported, since nothing is handled meanwhile.
        """
        idle = not self._preload.step(busy=busy or bool(self._waiting))
        if self._preload.ready and self._waiting:
            waiting, self._waiting = self._waiting, []
            gc.freeze()
            for command, reply in waiting:
                reply(self._fork(command))
        return idle

    def _fork(self, command: Fork) -> Mapping[str, Any]:
        try:
            request, agent_pid = ForkRequest.of(command, self._entry), os.getpid()
            self._last_output.rank_starting(request.rank, request.log)
            self._kept_memory.prepare(request.rank)
            with signals_blocked():
                pid = os.fork()
                if pid == 0:
                    become_rank(request, agent_pid, [*self._inherited(), *self._kept_memory.of_others(request.rank)])
        except OSError as error:
            return failure(f"{type(error).__name__}: {error}")
        self._children.add_rank(request.rank, pid, exit_mark(request.log))
        return dict(encode(Forked(pid)))
