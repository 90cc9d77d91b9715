"""The rank's side of `config watch_numbers`: digests of a cell's training steps, read just before each optimizer step.

There a step's gradients are complete, and the weights are still those that its forward has used. So one reading shows
whether replicas differ in either, and a number that is not finite is found before it reaches a weight. The device is
waited for once per step. Comparing with other ranks is left to the notebook: nothing is communicated here.

Replicas: DDP keeps the parameters of its model equal, DTensors and declared tensors are equal along the axes of their
mesh over which they are replicated, and so are some parameters of axon_nb's tensor-parallel layers. Other parameters
may differ between ranks as the program pleases.

Private hook: torch has none for a backward as a whole, so `torch.autograd.backward` is wrapped while a cell is watched.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import math
import os
import struct
import sys
import threading
import time
import weakref
from array import array
from collections import deque
from collections.abc import Iterable, Sequence
from types import CodeType, FrameType
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from msgspec import Struct, field
from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from axon_nb.comm.placements import Placed, placed
from axon_nb.engine.frames import step_depth
from axon_nb.engine.live_objects import DDP, FSDP, live_objects
from axon_nb.engine.nonfinite import LastCalls
from axon_nb.engine.parity.recorder import named_parameters
from axon_nb.engine.session import RankSession, user_variables
from axon_nb.engine.sharding import layer_shardings, local_tensor, ranks_at
from axon_nb.records.hooks import missing_hooks
from axon_nb.records.protocol.cells import CellFacts
from axon_nb.records.protocol.inspection import NumbersReply, NumbersRequest
from axon_nb.records.ranks import Runs, pack_ranks
from axon_nb.records.training.digests import LAST, NonFinite, Origin, StepNumbers
from axon_nb.shell import inner_function, user_frame

_WORD_BYTES = 8
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32}
_MAX_LOSSES = 64
"""Of one step, such as those of microbatches; the last are kept."""
_MAX_BYTES = 32 << 20
_MIN_ROWS, _MAX_ROWS = 64, 4096
_MAX_LOGS = 2
"""A cell may begin before the notebook has read the rest of the last one."""
_PATIENCE_S = 10.0
"""How long a rank waits for the notebook to stop the cell, before it does so itself."""
_POLL_S = 0.02


def is_comparable(tensor: torch.Tensor) -> bool:
    """Whether its memory holds all of its numbers, once each."""
    return tensor.layout is torch.strided and not tensor.is_quantized


def checksum(tensor: torch.Tensor) -> torch.Tensor:
    """Return the sum of a tensor's 64-bit words, modulo 2**64: any single bit that differs changes it.

    Args:
        tensor: Strided, of any shape and data type.

    Returns:
        An int64 of shape () on the same device.
    """
    flat = tensor.detach().reshape(-1)
    size = flat.element_size()
    per_word = max(1, _WORD_BYTES // size)
    if flat.storage_offset() % per_word:
        flat = flat.clone()  # a word must begin at a multiple of its size
    whole = flat.numel() // per_word * per_word
    total = flat[:whole].view(torch.int64).sum()
    if whole < flat.numel():
        total = total + flat[whole:].view(_INTEGERS[size]).sum()
    return total


def total_norm(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the 2-norm of some tensors together, which is finite if all of their numbers are, unless they are huge.

    Returns:
        A float64 of shape () on the device of the first.
    """
    dense = [tensor.coalesce().values() if tensor.layout is torch.sparse_coo else tensor for tensor in tensors]
    return torch.nn.utils.get_total_norm(dense).double()


class Losses:
    """Keeps the losses since the last optimizer step."""

    def __init__(self) -> None:
        self._kept: deque[torch.Tensor] = deque(maxlen=_MAX_LOSSES)
        self._original: Any = None
        self._wrapper: Any = None

    def begin(self) -> None:
        """Keep losses from now on."""
        if missing_hooks("inspection.backward_spans"):
            return
        original, kept = torch.autograd.backward, self._kept

        @functools.wraps(original)
        def backward(tensors: Any, *args: Any, **kwargs: Any) -> Any:
            for tensor in (tensors,) if isinstance(tensors, torch.Tensor) else tensors:
                if isinstance(tensor, torch.Tensor) and tensor.numel() == 1 and tensor.is_floating_point():
                    kept.append(local_tensor(tensor).detach())
            return original(tensors, *args, **kwargs)

        self._original, self._wrapper = original, backward
        torch.autograd.backward = backward

    def end(self) -> None:
        """Keep none any more."""
        # Code that wrapped it meanwhile keeps our wrapper, which only keeps a few numbers.
        if torch.autograd.backward is self._wrapper:
            torch.autograd.backward = self._original
        self._kept.clear()

    def take(self) -> list[torch.Tensor]:
        """Return the losses since the last call, each of one element."""
        losses = list(self._kept)
        self._kept.clear()
        return losses


def root_models(session: RankSession) -> list[tuple[str, nn.Module]]:
    """Return the outermost models of this rank with their variables; DDP and FSDP2 models may be in none."""
    variables = user_variables(session.kernel.shell).items()
    models = [(name, value) for name, value in variables if issubclass(type(value), nn.Module)]
    ddp, fsdp = live_objects(DDP, FSDP)
    models += [("", model) for model in (*ddp, *fsdp)]
    inside = {id(part) for _, model in models for part in model.modules() if part is not model}
    outermost = {id(model): (name, model) for name, model in reversed(models) if id(model) not in inside}
    return list(outermost.values())


class Replicas:
    """What is known of the parameters of one optimizer; keeps none of them.

    Args:
        parameters: Them.
        models: From `root_models`.
    """

    def __init__(self, parameters: Sequence[torch.Tensor], models: Sequence[tuple[str, nn.Module]]) -> None:
        self.names = _names(parameters, models)
        """A path in the model for each."""
        self.compared: list[int] = []
        """Those that have replicas, by their index."""
        self.sets: dict[tuple[int, ...], list[int]] = {}
        """By ranks that hold the same, the parameters, by their index in `compared`."""
        in_ddp, in_layers = _in_ddp(), _in_layers(model for _, model in models)
        for index, parameter in enumerate(parameters):
            found = placed(parameter)
            sets = {in_ddp.get(id(parameter), ()), in_layers.get(id(parameter), ())}
            sets.add(_along_replicated_axes(found) if found is not None else ())
            several = sorted(ranks for ranks in sets if len(ranks) > 1)
            for ranks in several:
                self.sets.setdefault(ranks, []).append(len(self.compared))
            if several:
                self.compared.append(index)


def _names(parameters: Sequence[torch.Tensor], models: Sequence[tuple[str, nn.Module]]) -> list[str]:
    found: dict[int, tuple[str, str]] = {}
    for variable, model in models:
        for name, held in named_parameters(model):
            found.setdefault(id(held), (variable, name))
    several = len({found[id(one)][0] for one in parameters if id(one) in found}) > 1
    names = []
    for index, parameter in enumerate(parameters):
        variable, name = found.get(id(parameter), ("", f"parameter {index}"))
        names.append(f"{variable}.{name}" if several and variable else name)
    return names


def _in_ddp() -> dict[int, tuple[int, ...]]:
    groups: dict[int, tuple[int, ...]] = {}
    for model in live_objects(DDP)[0]:
        try:
            ranks = tuple(sorted(dist.get_process_group_ranks(model.process_group)))
        except KeyError:  # its group has been destroyed
            continue
        ignored = set(getattr(model, "parameters_to_ignore", ()))
        for name, parameter in model.module.named_parameters():
            if name not in ignored:
                groups[id(parameter)] = ranks
    return groups


def _in_layers(models: Iterable[nn.Module]) -> dict[int, tuple[int, ...]]:
    modules = (module for model in models for module in model.modules())
    return {
        key: tuple(sharding.group.ranks) for key, sharding in layer_shardings(modules).items() if sharding.dim is None
    }


def _along_replicated_axes(tensor: Placed) -> tuple[int, ...]:
    """Return the ranks that hold the same part of a tensor, of which this one is one."""
    at = tensor.mesh.get_coordinate()
    if at is None:
        return ()
    split = [axis for axis, placement in enumerate(tensor.placements) if not placement.is_replicate()]
    return tuple(sorted(ranks_at(tensor.mesh, split, at)))


class Row(Struct, frozen=True):
    """One step."""

    optimizer: int
    step: int
    where: str
    before: str
    """As in `StepNumbers`."""
    replicas: Replicas
    weights: array[int]
    gradients: array[int]
    digests: list[int]
    """Of the weights and of the gradients of each set of `replicas`, in turn."""


class NumberLog:
    """The rows of one cell; the oldest are dropped.

    Args:
        run: Id of the cell's run.
    """

    def __init__(self, run: str) -> None:
        self.run = run
        self.non_finite: NonFinite | None = None
        """The first number that is not finite."""
        self.end = 0
        """How many rows there were."""
        self._rows: deque[Row] = deque(maxlen=_MAX_ROWS)

    def add(
        self,
        optimizer: int,
        step: int,
        places: tuple[str, str],
        *,
        replicas: Replicas,
        weights: Sequence[int],
        gradients: Sequence[int],
    ) -> None:
        """Add a step; `places` is where it is made, and where the one before was."""
        digests = []
        for members in replicas.sets.values():
            digests += [_digest(weights, members), _digest(gradients, members)]
        row = Row(optimizer, step, *places, replicas, array("q", weights), array("q", gradients), digests)
        if len(self._rows) >= max(_MIN_ROWS, _MAX_BYTES // (16 * len(weights) + 256)):
            self._rows.popleft()
        self._rows.append(row)
        self.end += 1

    def since(self, number: int) -> tuple[list[list[Any]], dict[int, list[Runs]], int]:
        """Return what is compared of each row, the packed sets of ranks by optimizer, and how many rows were dropped.

        Args:
            number: Of the first row wanted.
        """
        rows = list(self._rows)
        first = self.end - len(rows)
        wanted = rows[max(0, number - first) :]
        sets = {row.optimizer: row.replicas for row in wanted}
        packed = {optimizer: list(map(pack_ranks, replicas.sets)) for optimizer, replicas in sets.items()}
        return [[row.optimizer, row.step, *row.digests] for row in wanted], packed, max(0, first - number)

    def details(self, optimizer: int, step: int) -> StepNumbers | None:
        """Return the digests of each parameter in one step; None: it was dropped, or never made."""
        row = next((row for row in list(self._rows) if (row.optimizer, row.step) == (optimizer, step)), None)
        if row is None:
            return None
        names = [row.replicas.names[index] for index in row.replicas.compared]
        sets = [(list(ranks), list(members)) for ranks, members in row.replicas.sets.items()]
        return StepNumbers(optimizer, step, row.where, row.before, names, sets, list(row.weights), list(row.gradients))


def _digest(checksums: Sequence[int], members: Sequence[int]) -> int:
    if not checksums:
        return 0
    chosen = checksums if len(members) == len(checksums) else [checksums[index] for index in members]
    return int.from_bytes(hashlib.blake2b(array("q", chosen).tobytes(), digest_size=6).digest(), "big")


class _Watched(Struct):
    """An optimizer in the running cell."""

    number: int
    parameters: list[torch.Tensor]
    replicas: Replicas
    steps: int = 0
    place: str = ""


class _Reading(Struct):
    """What was read of one step."""

    weights: list[int]
    gradients: list[int] = field(default_factory=list)
    norm: float = 0.0
    """Of all gradients."""
    losses: list[float] = field(default_factory=list)

    @property
    def is_finite(self) -> bool:
        return math.isfinite(self.norm) and all(map(math.isfinite, self.losses))


class NumberWatch:
    """Watches the cells of a rank."""

    def __init__(self, session: RankSession) -> None:
        self._session = session
        self._logs: list[NumberLog] = []
        self._optimizers: weakref.WeakKeyDictionary[Optimizer, _Watched] = weakref.WeakKeyDictionary()
        self._places: dict[tuple[int, CodeType, int], str] = {}
        self._losses, self._last_calls = Losses(), LastCalls()
        self._handle: Any = None
        self._stops = False
        self._waiting = ""
        """As in `NumbersReply`."""
        self._may_repeat = False
        """Whether all ranks wait, and repeat together what communicates."""
        self._pid = os.getpid()

    @property
    def is_on(self) -> bool:
        """Whether an interrupt has kept the last cell's watch from ending."""
        return self._handle is not None

    def begin_cell(self, facts: CellFacts) -> None:
        """Watch the cell that begins."""
        run, mode = facts.run, facts.watch_numbers
        self.end_cell(is_ok=False)
        if not mode:
            return
        self._stops, self._may_repeat, self._waiting = mode == "stop", False, ""
        self._logs = [*self._logs, NumberLog(run)][-_MAX_LOGS:]
        self._losses.begin()
        self._last_calls.watch(model for _, model in root_models(self._session))
        self._handle = register_optimizer_step_pre_hook(self._before_step)

    def end_cell(self, *, is_ok: bool) -> None:
        """Read the weights once more, unless the cell failed, and stop watching."""
        if self._handle is None:
            return
        self._handle.remove()
        self._handle = None
        self._losses.end()
        self._last_calls.end()
        if is_ok:
            with torch.no_grad():
                for watched in self._optimizers.values():
                    weights = self._read(watched, [], None).weights
                    self._log(watched, LAST, "", weights=weights)
        self._optimizers.clear()
        self._places.clear()

    def report(self, request: NumbersRequest) -> NumbersReply:
        """Answer the notebook; on any thread."""
        log = next((one for one in self._logs if one.run == request.run), None)
        if log is None:
            return NumbersReply([], {}, 0, 0)
        self._may_repeat = self._may_repeat or request.repeat
        waiting = self._waiting
        rows, sets, lost = log.since(request.since)
        details = None if request.details is None else log.details(*request.details)
        return NumbersReply(rows, sets, request.since + lost + len(rows), lost, log.non_finite, details, waiting)

    def _before_step(self, optimizer: Optimizer, *_: Any) -> None:
        frame = sys._getframe(1)
        on_main = os.getpid() == self._pid and threading.current_thread() is threading.main_thread()
        if not on_main or step_depth(frame) > 1:  # an optimizer that steps another one counts as one step
            return
        with torch.no_grad():
            watched = self._watched(optimizer)
            is_scaled = getattr(optimizer, "found_inf", None) is not None  # a GradScaler skips such steps
            gradients = [parameter.grad for parameter in watched.parameters]
            reading = self._read(watched, self._losses.take(), gradients, with_norm=not is_scaled)
            place = self._place(frame)
            log = self._logs[-1]
            if not reading.is_finite and log.non_finite is None:
                log.non_finite = self._find(watched, reading, gradients, place)
            # Last, as a step that the notebook sees is one of which the rank has said all.
            self._log(watched, watched.steps, place, weights=reading.weights, gradients=reading.gradients)
        watched.steps += 1
        watched.place = place
        if log.non_finite is not None and self._stops:
            self._stop(log, log.non_finite)

    def _watched(self, optimizer: Optimizer) -> _Watched:
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        watched = self._optimizers.get(optimizer)
        if watched is None or list(map(id, watched.parameters)) != list(map(id, parameters)):  # a group may be added
            models = root_models(self._session)
            self._last_calls.watch(model for _, model in models)
            replicas = Replicas(parameters, models)
            if watched is None:
                watched = self._optimizers[optimizer] = _Watched(len(self._optimizers), parameters, replicas)
            watched.parameters, watched.replicas = parameters, replicas
        return watched

    def _read(
        self,
        watched: _Watched,
        losses: Sequence[torch.Tensor],
        gradients: Sequence[torch.Tensor | None] | None,
        *,
        with_norm: bool = True,
    ) -> _Reading:
        """Read the device once; `gradients` is None for the weights alone."""
        compared = watched.replicas.compared
        parts = [checksum(local_tensor(watched.parameters[index])) for index in compared]
        places: dict[int, int] = {}
        norms = []
        if gradients is not None:
            for position, index in enumerate(compared):
                if _has_replicas(gradient := gradients[index]):
                    places[position] = len(parts)
                    parts.append(checksum(local_tensor(gradient)))
            present = [local_tensor(gradient) for gradient in gradients if gradient is not None]
            if present and with_norm:
                norms.append(total_norm(present))
        floats = [*norms, *(loss.reshape(()).double() for loss in losses if with_norm)]
        words = _to_host([*parts, *(number.view(torch.int64) for number in floats)])
        count = len(compared)
        read = struct.unpack(f"={len(floats)}d", struct.pack(f"={len(floats)}q", *words[len(parts) :]))
        return _Reading(
            words[:count],
            [] if gradients is None else [words[places[i]] if i in places else 0 for i in range(count)],
            read[0] if norms else 0.0,
            list(read[len(norms) :]),
        )

    def _log(
        self, watched: _Watched, step: int, place: str, *, weights: list[int], gradients: Sequence[int] = ()
    ) -> None:
        log, places = self._logs[-1], (place, watched.place)
        log.add(watched.number, step, places, replicas=watched.replicas, weights=weights, gradients=gradients)

    def _place(self, frame: FrameType) -> str:
        cell, caller = user_frame(frame), frame.f_back
        if cell is None or caller is None:
            return ""
        key = cell.f_lineno, caller.f_code, caller.f_lineno
        if key not in self._places:
            self._places[key] = f"line {cell.f_lineno}{inner_function(frame, cell)}"
        return self._places[key]

    def _find(
        self, watched: _Watched, reading: _Reading, gradients: Sequence[torch.Tensor | None], place: str
    ) -> NonFinite | None:
        """Say what came first; None: all numbers are finite, and their norm alone is not."""
        replicas, optimizer, step = watched.replicas, watched.number, watched.steps
        for name, parameter in zip(replicas.names, watched.parameters, strict=True):
            if not _is_finite(parameter):
                return NonFinite("weight", name, where=place, optimizer=optimizer, step=step)
        origin = None
        with contextlib.suppress(Exception):  # a model that cannot be called twice
            origin = self._last_calls.find()
        if origin is not None:
            return self._with(NonFinite("", "", where=place, optimizer=optimizer, step=step), origin)
        if not all(map(math.isfinite, reading.losses)):
            return NonFinite("loss", "", where=place, optimizer=optimizer, step=step)
        # A backward reaches the last parameters first.
        for name, gradient in zip(reversed(replicas.names), reversed(gradients), strict=True):
            if gradient is not None and not _is_finite(gradient):
                return NonFinite("gradient", name, where=place, optimizer=optimizer, step=step)
        return None

    def _stop(self, log: NumberLog, found: NonFinite) -> None:
        """Wait until the notebook, which compares what all ranks have found, stops the cell."""
        is_known = found.stage not in ("loss", "gradient") or not self._last_calls.are_split
        self._waiting = "repeated" if is_known else "ready"
        end = time.monotonic() + _PATIENCE_S
        while time.monotonic() < end:
            time.sleep(_POLL_S)
            self._session.steps.after_foreign_step()
            if self._may_repeat and self._waiting == "ready":
                log.non_finite = self._find_together(found)
                self._waiting = "repeated"
                end = time.monotonic() + _PATIENCE_S
        of = f" of {found.name}" if found.name else ""
        raise FloatingPointError(f"The {found.stage}{of} is not finite in step {found.step + 1}.")

    def _find_together(self, found: NonFinite) -> NonFinite:
        origin = None
        with contextlib.suppress(Exception):
            origin = self._last_calls.find_together()
        return found if origin is None else self._with(found, origin)

    @staticmethod
    def _with(found: NonFinite, origin: Origin) -> NonFinite:
        return msgspec.structs.replace(found, **msgspec.structs.asdict(origin) | {"where": origin.where or found.where})


def _has_replicas(gradient: torch.Tensor | None) -> bool:
    if gradient is None or not is_comparable(gradient):
        return False
    found = placed(gradient)
    return found is None or not any(placement.is_partial() for placement in found.placements)


def _is_finite(tensor: torch.Tensor) -> bool:
    local = local_tensor(tensor)
    return bool(torch.isfinite(local.coalesce().values() if local.layout is torch.sparse_coo else local).all())


def _to_host(numbers: Sequence[torch.Tensor]) -> list[int]:
    if not numbers:
        return []
    device = numbers[0].device
    words: list[int] = torch.stack([number.to(device, non_blocking=True) for number in numbers]).tolist()
    return words
