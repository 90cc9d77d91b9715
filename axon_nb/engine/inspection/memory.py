"""Measures what this rank's memory holds: storages by role, the allocator's numbers, gradients, a model's inputs.

The capacity of a rank is that of its GPU or its host, unless a cgroup allows less.

During a backward pass C++ sets `.grad` without holding the GIL, so a thread that reads it may crash the process
(SIGSEGV, seen with torch 2.13 within seconds). Gradients are therefore read while no cell runs, or by the main thread
itself between two instructions, when none of its backward passes is running.

Inputs of a model's last call (shapes and dtypes) are captured by a hook that lasts for one call; planners need them to
run the model without data. The hook uses torch's public API and removes itself after the call. A copy of the model made
meanwhile gets a hook that does nothing.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import inspect
import operator
import resource
import signal
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import Future
from types import FrameType
from typing import Any, TypeVar

import torch
from torch import nn
from torch.optim import Optimizer

from axon_nb.engine.groups.abort import in_thread
from axon_nb.engine.inspection.telemetry import resident_bytes
from axon_nb.engine.live_objects import LiveTensors, storages_of
from axon_nb.engine.session import RankSession, resolve_variable, user_variables
from axon_nb.errors import UsageError
from axon_nb.host.resources import free_memory
from axon_nb.records.memory import MemoryUse
from axon_nb.records.protocol.inspection import MemoryReply

_NEVER = -1
_PLAIN = (bool, int, float, str, type(None))
T = TypeVar("T")
_MAX_CACHED = 64
_gradient = operator.attrgetter("grad")
# Part of Python's stable ABI: the main thread runs these calls between two instructions, as it does signal handlers.
_add_pending_call = ctypes.pythonapi.Py_AddPendingCall
_add_pending_call.argtypes = (ctypes.c_void_p, ctypes.c_void_p)
_INTERRUPT = ctypes.cast(ctypes.pythonapi.PyErr_SetInterruptEx, ctypes.c_void_p)


class UncopiedHook:
    """A module hook that is not copied with its module: the copy gets a hook that does nothing.

    Args:
        call: Called with what the hook gets.
    """

    def __init__(self, call: Callable[..., None]) -> None:
        self._call = call

    def __call__(self, *args: Any) -> None:
        self._call(*args)

    def __reduce__(self) -> tuple[Callable[[], Any], tuple[()]]:
        return _make_noop, ()


def _make_noop() -> Callable[..., None]:
    return _noop


def _noop(*_: Any) -> None:
    pass


class CallRecorder:
    """Records how the models of a rank are called."""

    def __init__(self, session: RankSession) -> None:
        self._session = session
        self._inputs: weakref.WeakKeyDictionary[nn.Module, list[Any] | None] = weakref.WeakKeyDictionary()
        self._cells: weakref.WeakKeyDictionary[nn.Module, int | None] = weakref.WeakKeyDictionary()
        """The cell in which a model's hook was last installed."""
        self._pending: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        """Models whose hook has not fired yet."""

    def record_next(self, module: nn.Module) -> None:
        """Record the inputs of the model's next call; installs at most one hook per cell."""
        cell = self._session.cell
        if module in self._pending or self._cells.get(module, _NEVER) == cell:
            return
        self._cells[module] = cell
        self._pending.add(module)

        def note(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if not torch.compiler.is_compiling():
                handle.remove()
                self._note(module, args, kwargs)

        handle = module.register_forward_pre_hook(UncopiedHook(note), with_kwargs=True)

    def _note(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._pending.discard(module)
        try:
            self._inputs[module] = _describe(module, args, kwargs)
        except Exception:  # recording must never break the user's call
            self._inputs[module] = None

    def inputs_of(self, module: nn.Module) -> list[Any] | None:
        """Return the arguments of the last recorded call: ``{"shape": […], "dtype": …}`` for a tensor, else the value.

        None if no call was recorded, or if it cannot be repeated with positional arguments and without data.
        """
        return self._inputs.get(module)


def _describe(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any] | None:
    try:
        bound = inspect.signature(module.forward).bind(*args, **kwargs)
    except (TypeError, ValueError):
        return None
    if bound.kwargs:
        return None
    facts: list[Any] = []
    for value in bound.args:
        if type(value) in (torch.Tensor, nn.Parameter):
            facts.append({"shape": list(value.shape), "dtype": str(value.dtype).removeprefix("torch.")})
        elif isinstance(value, _PLAIN):
            facts.append(value)
        else:
            return None
    return facts


class GradientReader:
    """Reads gradients for other threads."""

    def __init__(self, session: RankSession) -> None:
        self._session = session
        self._results: dict[Hashable, Any] = {}
        """Results that the main thread computed last, by key; the oldest are evicted first."""
        self._jobs: deque[Callable[[], None]] = deque()
        self._c_callback = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)(self._run_pending_job)
        self._callback = ctypes.cast(self._c_callback, ctypes.c_void_p)

    def read(
        self,
        key: Hashable,
        parameters: Sequence[torch.Tensor],
        compute: Callable[[list[torch.Tensor | None]], T],
        *,
        default: T,
    ) -> T:
        """Compute a result from the gradients of these parameters; while a cell runs, return the previous result.

        Args:
            key: Identifies the request, so that repeated requests share a cached result.
            parameters: Any tensors.
            compute: Called with their gradients (None if there is none); must not keep references to them.
            default: Returned until the main thread has computed a result.
        """
        if threading.current_thread() is threading.main_thread():
            return compute([parameter.grad for parameter in parameters])
        session, gradients = self._session, map(_gradient, parameters)
        # No instruction between the check and the call can release the GIL, and the call runs entirely in C, so no cell
        # starts in between.
        if session.cell is None:
            return compute(list(gradients))
        if not self._jobs:
            self._jobs.append(lambda: self._store(key, compute([parameter.grad for parameter in parameters])))
            if _add_pending_call(self._callback, None) != 0:
                self._jobs.clear()  # the queue is full; the next request comes soon
        result: T = self._results.get(key, default)
        return result

    def _store(self, key: Hashable, result: Any) -> None:
        self._results.pop(key, None)
        self._results[key] = result
        while len(self._results) > _MAX_CACHED:
            del self._results[next(iter(self._results))]

    def _run_pending_job(self, _: Any) -> int:
        # Run only one job, so that frequent requests do not delay the user's code.
        with contextlib.suppress(Exception):  # an exception would surface in the user's code
            self._jobs[0]()
        self._jobs.clear()
        return 0

    def defers_interrupt(self, frame: FrameType | None) -> bool:
        """Whether an interrupt landed on `frame` while gradients were being read; if so, it is raised again afterwards.

        An exception raised there would be swallowed by the C caller.
        """
        while frame is not None:
            if frame.f_code is GradientReader._run_pending_job.__code__:
                return bool(_add_pending_call(_INTERRUPT, signal.SIGINT) == 0)
            frame = frame.f_back
        return False


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
        self._imports: dict[str, Future[Any]] = {}

    def get(self, name: str) -> Any:
        """Return the module of this name; None until it is imported.

        Raises:
            ImportError: the import failed.
        """
        with self._lock:
            if name not in self._imports:
                self._imports[name] = in_thread(lambda: importlib.import_module(name), f"axon_nb-import-{name}")
            done = self._imports[name]
            if not done.done():
                return None
            if (error := done.exception()) is not None:
                del self._imports[name]  # the next request tries again
                raise ImportError(f"{name} cannot be imported: {error}") from error
        return done.result()


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
        # There is no formula for all variables together: which of them belong together is unknown.
        planner = self._imports.get("axon_nb.engine.inspection.memory_plan") if names else None
        estimated, note = (None, "") if planner is None else planner.estimate(modules, optimizers, session)
        return MemoryReply(
            measured=measured,
            estimated=estimated,
            notes=(note,) if note else (),
            is_pending=bool(names) and planner is None,
            model=self._model_key(planner, modules),
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
