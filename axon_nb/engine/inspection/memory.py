"""What this rank's memory holds: the storages of its tensors by role, and what the allocator says; and the estimate.

How much memory a rank could have: of its GPU, or of its host, where a cgroup may allow less than there is.

Modules that take seconds to import, for threads that answer at once: imported beside, there the next time.
"""

from __future__ import annotations

import importlib
import resource
import threading
import time
from collections.abc import Iterable
from typing import Any

import torch
from torch.optim import Optimizer

from axon_nb.engine.inspection.gradients import from_gradients
from axon_nb.engine.inspection.sampler import resident_bytes
from axon_nb.engine.live_objects import LivingTensors, storages_of
from axon_nb.engine.namespace import look_up, users_variables
from axon_nb.engine.session import RankSession, current
from axon_nb.errors import UsageError
from axon_nb.host.resources import free_memory
from axon_nb.records.memory import MemoryUse
from axon_nb.records.protocol.contents import MemoryReply

__all__ = ["capacity", "loaded", "memory_report", "modules_and_optimizers"]


def capacity(device: torch.device, resident: int) -> tuple[int | None, int | None]:
    """(what there is for this rank, what of it is taken), in bytes; None: not known.

    Args:
        device: What the rank computes on. Of a CUDA device: all its memory, and what all processes have of it.
        resident: Resident memory of the process. On a CPU: that and what is free on the host.
    """
    if device.type == "cuda":
        if not torch.cuda.is_initialized():  # asking would initialise it
            return None, None
        free, total = torch.cuda.mem_get_info(device)
        return total, total - free
    room = free_memory()
    return (None, None) if room is None else (resident + room, resident)


_lock = threading.Lock()
_wanted: dict[str, threading.Thread] = {}
_there: dict[str, Any] = {}


def loaded(name: str) -> Any:
    """The module; None as long as it is being imported.

    Raises:
        ImportError: it could not be imported.
    """
    with _lock:
        if name not in _wanted:
            _wanted[name] = threading.Thread(target=_load, args=(name,), name=f"axon_nb-import-{name}", daemon=True)
            _wanted[name].start()
    found = _there.get(name)
    if isinstance(found, Exception):
        raise ImportError(f"{name} cannot be imported: {found}") from found
    return found


def _load(name: str) -> None:
    try:
        _there[name] = importlib.import_module(name)
    except Exception as error:
        _there[name] = error


_living = LivingTensors()


def memory_report(names: Iterable[str]) -> MemoryReply:
    """What is there now.

    Args:
        names: Modules and optimizers; empty: all variables are looked at.

    Raises:
        UsageError: there is no such variable, or it is neither.
    """
    session = current()
    chosen = list(names)
    modules, optimizers = modules_and_optimizers(chosen, session)
    measured = _measure(modules, optimizers, session)
    predicted, why, estimator, facts = None, "", None, None
    if chosen:  # of all variables together there is no formula: what of them belongs together is not known
        estimator = loaded("axon_nb.engine.inspection.memory_estimate")
        facts = loaded("axon_nb.engine.inspection.model_facts")
    if estimator is not None:
        predicted, why = estimator.estimate(modules, optimizers, session)
    return MemoryReply(
        measured=measured,
        estimated=predicted,
        notes=(why,) if why else (),
        is_pending=bool(chosen) and None in (estimator, facts),
        model=_key(facts, modules),
    )


def _key(facts: Any, modules: list[torch.nn.Module]) -> str:
    if facts is None or len(modules) != 1:
        return ""
    try:
        return str(facts.model_key(modules[0]))
    except Exception:  # an odd model of the user's is measured all the same
        return ""


def modules_and_optimizers(names: list[str], session: RankSession) -> tuple[list[torch.nn.Module], list[Optimizer]]:
    """Those of these names, with the optimizers that step the modules where none is named; all when no name is given.

    Raises:
        UsageError: there is no such variable, or it is neither.
    """
    space = session.kernel.shell.user_ns
    values = [look_up(name, space) for name in names]
    for name, value in zip(names, values, strict=True):
        if not isinstance(value, torch.nn.Module | Optimizer):
            raise UsageError(f"{name!r} is a {type(value).__name__}: `%memory` takes modules and optimizers.")
    given = values or list(users_variables(session.kernel.shell).values())
    # type() and not isinstance: lazy proxies answer the latter with side effects.
    modules = [value for value in given if issubclass(type(value), torch.nn.Module)]
    optimizers = [value for value in given if issubclass(type(value), Optimizer)]
    if values and not optimizers:
        optimizers = _of_these(modules, session)
    return modules, optimizers


def _of_these(modules: list[torch.nn.Module], session: RankSession) -> list[Optimizer]:
    """The optimizers among the variables that step parameters of these modules."""
    own = {id(parameter) for module in modules for parameter in module.parameters()}
    everything = users_variables(session.kernel.shell).values()
    found = {id(value): value for value in everything if isinstance(value, Optimizer)}
    return [value for value in found.values() if own & {id(p) for g in value.param_groups for p in g["params"]}]


def _measure(modules: list[torch.nn.Module], optimizers: list[Optimizer], session: RankSession) -> MemoryUse:
    kind = session.device.type
    parameters = [parameter for module in modules for parameter in module.parameters()]
    none: dict[int, int] = {}
    key = ("memory", *map(id, modules))
    gradients = from_gradients(key, parameters, lambda found: storages_of(found, kind), before=none)
    roles = {
        "parameters": storages_of(parameters, kind),
        "gradients": gradients,
        "optimizer": storages_of(_states(optimizers), kind),
        "buffers": storages_of([buffer for module in modules for buffer in module.buffers()], kind),
        # While nothing runs nobody is held up.
        "other": _living.storages(kind, now=session.cell is None),
    }
    sizes, seen = {}, set[int]()
    for role, found in roles.items():  # a storage counts for the first role that it has
        sizes[role] = sum(size for place, size in found.items() if place not in seen)
        seen |= found.keys()
    resident = resident_bytes()
    highest = max(resident, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
    limit, occupied = capacity(session.device, resident)
    peak, source = None, "storages"
    if kind == "cuda" and torch.cuda.is_initialized():
        source, peak = "allocator", int(torch.cuda.max_memory_allocated(session.device))
        # What autograd keeps for backward is known to C++ alone.
        sizes["activations"] = max(0, torch.cuda.memory_allocated(session.device) - sum(sizes.values()))
    return MemoryUse(
        rank=session.config.rank,
        time_ns=time.monotonic_ns(),
        source=source,
        by_role=sizes,
        peak=peak,
        resident=resident,
        capacity=limit,
        resident_peak=highest,
        occupied=occupied,
    )


def _states(optimizers: list[Optimizer]) -> list[torch.Tensor]:
    # ZeroRedundancyOptimizer holds them in the optimizer of its own part.
    states = [state for own in optimizers for state in list(getattr(own, "optim", own).state.values())]
    values = [value for state in states if isinstance(state, dict) for value in list(state.values())]
    return [value for value in values if isinstance(value, torch.Tensor)]
