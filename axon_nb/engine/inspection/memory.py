"""Measures what this rank's memory holds: tensor storages by role, the allocator's numbers, and an estimate by formula.

The capacity of a rank is that of its GPU or its host, unless a cgroup allows less.
"""

from __future__ import annotations

import importlib
import resource
import threading
import time
from collections.abc import Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from axon_nb.engine.inspection.gradients import GradientReader
from axon_nb.engine.inspection.last_call import CallRecorder
from axon_nb.engine.inspection.sampler import resident_bytes
from axon_nb.engine.live_objects import LiveTensors, storages_of
from axon_nb.engine.namespace import resolve_variable, user_variables
from axon_nb.engine.session import RankSession
from axon_nb.errors import UsageError
from axon_nb.host.resources.cgroups import free_memory
from axon_nb.records.memory import MemoryUse
from axon_nb.records.protocol.contents import MemoryReply


def capacity(device: torch.device, resident: int) -> tuple[int | None, int | None]:
    """(capacity for this rank, used part of it), in bytes; None if unknown.

    Args:
        device: The device that the rank computes on. For a CUDA device: its total memory, and what all processes use.
        resident: Resident memory of the process. On a CPU the capacity is this plus what is free on the host.
    """
    if device.type == "cuda":
        if not torch.cuda.is_initialized():  # the query would initialise CUDA
            return None, None
        free, total = torch.cuda.mem_get_info(device)
        return total, total - free
    room = free_memory()
    return (None, None) if room is None else (resident + room, resident)


class BackgroundImports:
    """Imports modules that take seconds in threads, because requests must be answered at once."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._threads: dict[str, threading.Thread] = {}
        self._results: dict[str, Any] = {}

    def get(self, name: str) -> Any:
        """Return the module of this name; None until it is imported.

        Raises:
            ImportError: the import failed.
        """
        with self._lock:
            if name not in self._threads:
                thread = threading.Thread(target=self._import, args=(name,), name=f"axon_nb-import-{name}", daemon=True)
                self._threads[name] = thread
                thread.start()
        result = self._results.get(name)
        if isinstance(result, Exception):
            with self._lock:  # the next request tries again
                del self._threads[name], self._results[name]
            raise ImportError(f"{name} cannot be imported: {result}") from result
        return result

    def _import(self, name: str) -> None:
        try:
            self._results[name] = importlib.import_module(name)
        except Exception as error:
            self._results[name] = error


class MemoryReader:
    """Reports the memory of a rank.

    Args:
        session: This rank.
        gradients: Reads its gradients.
        calls: How its models were called.
        imports: Imports what takes seconds.
    """

    def __init__(
        self, session: RankSession, gradients: GradientReader, calls: CallRecorder, imports: BackgroundImports
    ) -> None:
        self._session = session
        self._gradients = gradients
        self._calls = calls
        self._imports = imports
        self._live_tensors = LiveTensors()

    def report(self, names: Sequence[str]) -> MemoryReply:
        """Report current memory use.

        Args:
            names: Modules and optimizers; empty for all variables.

        Raises:
            UsageError: a variable does not exist, or is neither a module nor an optimizer.
        """
        session = self._session
        modules, optimizers = modules_and_optimizers(names, session)
        measured = measure(modules, optimizers, session, gradients=self._gradients, live_tensors=self._live_tensors)
        estimated, note, estimator, facts = None, "", None, None
        if names:  # no formula for all variables together: which of them belong together is unknown
            estimator = self._imports.get("axon_nb.engine.inspection.memory_estimate")
            facts = self._imports.get("axon_nb.engine.inspection.model_facts")
        if estimator is not None:
            estimated, note = estimator.estimate(modules, optimizers, session)
        return MemoryReply(
            measured=measured,
            estimated=estimated,
            notes=(note,) if note else (),
            is_pending=bool(names) and None in (estimator, facts),
            model=self._model_key(facts, modules),
        )

    def _model_key(self, facts: Any, modules: list[torch.nn.Module]) -> str:
        if facts is None or len(modules) != 1:
            return ""
        try:
            return str(facts.model_key(modules[0], self._calls))
        except Exception:  # an unusual model is measured anyway
            return ""


def measure(
    modules: list[torch.nn.Module],
    optimizers: list[Optimizer],
    session: RankSession,
    *,
    gradients: GradientReader,
    live_tensors: LiveTensors,
) -> MemoryUse:
    """Measure what this rank's memory holds, by role.

    Args:
        modules: Whose parameters, gradients and buffers are told apart from other tensors.
        optimizers: Whose states are.
        session: This rank.
        gradients: Reads its gradients.
        live_tensors: Finds its tensors.
    """
    device_type = session.device.type
    parameters = [parameter for module in modules for parameter in module.parameters()]
    empty: dict[int, int] = {}
    key = ("memory", *map(id, modules))
    of_gradients = gradients.read(key, parameters, lambda storages: storages_of(storages, device_type), default=empty)
    roles = {
        "parameters": storages_of(parameters, device_type),
        "gradients": of_gradients,
        "optimizer": storages_of(_state_tensors(optimizers), device_type),
        "buffers": storages_of([buffer for module in modules for buffer in module.buffers()], device_type),
        "copies": storages_of([*session.snapshots.copies(), *session.protection.copies()], device_type),
        # While no cell runs, a scan delays nothing.
        "other": live_tensors.storages(device_type, now=session.cell is None),
    }
    sizes, seen = {}, set[int]()
    for role, storages in roles.items():  # a storage counts for its first role
        sizes[role] = sum(size for place, size in storages.items() if place not in seen)
        seen |= storages.keys()
    resident = resident_bytes()
    resident_peak = max(resident, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
    total, occupied = capacity(session.device, resident)
    peak, source = None, "storages"
    if device_type == "cuda" and torch.cuda.is_initialized():
        source, peak = "allocator", int(torch.cuda.max_memory_allocated(session.device))
        # Only C++ knows what autograd saves for backward.
        sizes["activations"] = max(0, torch.cuda.memory_allocated(session.device) - sum(sizes.values()))
    return MemoryUse(
        rank=session.config.rank,
        time_ns=time.monotonic_ns(),
        source=source,
        by_role=sizes,
        peak=peak,
        resident=resident,
        capacity=total,
        resident_peak=resident_peak,
        occupied=occupied,
    )


def modules_and_optimizers(names: Sequence[str], session: RankSession) -> tuple[list[torch.nn.Module], list[Optimizer]]:
    """Resolve names to modules and optimizers; without names, return all variables of these types.

    If only modules are named, the optimizers that step their parameters are added.

    Raises:
        UsageError: a variable does not exist, or is neither a module nor an optimizer.
    """
    space = session.kernel.shell.user_ns
    values = [resolve_variable(name, space) for name in names]
    for name, value in zip(names, values, strict=True):
        if not isinstance(value, torch.nn.Module | Optimizer):
            raise UsageError(f"{name!r} has type {type(value).__name__}: `%memory` accepts modules and optimizers.")
    candidates = values or list(user_variables(session.kernel.shell).values())
    # type() instead of isinstance: lazy proxies answer the latter with side effects.
    modules = [value for value in candidates if issubclass(type(value), torch.nn.Module)]
    optimizers = [value for value in candidates if issubclass(type(value), Optimizer)]
    if values and not optimizers:
        optimizers = _optimizers_of(modules, session)
    return modules, optimizers


def _optimizers_of(modules: list[torch.nn.Module], session: RankSession) -> list[Optimizer]:
    """The optimizers among the variables that step parameters of these modules."""
    parameter_ids = {id(parameter) for module in modules for parameter in module.parameters()}
    everything = user_variables(session.kernel.shell).values()
    optimizers = {id(value): value for value in everything if isinstance(value, Optimizer)}
    return [
        item for item in optimizers.values() if parameter_ids & {id(p) for g in item.param_groups for p in g["params"]}
    ]


def _state_tensors(optimizers: list[Optimizer]) -> list[torch.Tensor]:
    # ZeroRedundancyOptimizer holds its state in the optimizer of its own partition.
    inner = [getattr(optimizer, "optim", optimizer) for optimizer in optimizers]
    states = [state for optimizer in inner for state in list(optimizer.state.values())]
    values = [value for state in states if isinstance(state, dict) for value in list(state.values())]
    return [value for value in values if isinstance(value, torch.Tensor)]
