"""Watches the numbers of a cell's training steps, just before each optimizer step.

There a step's gradients are complete, and the weights are still those that its forward has used. So one reading shows
whether replicas differ in either, and a number that is not finite is found before it reaches a weight. The device is
waited for once per step. Comparing with other ranks is left to the notebook: nothing is communicated here.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import struct
import sys
import threading
import time
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import CodeType, FrameType
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from axon_nb.comm.placements import placed
from axon_nb.engine.divergence.digests import checksum, is_comparable, total_norm
from axon_nb.engine.divergence.log import NumberLog
from axon_nb.engine.divergence.losses import Losses
from axon_nb.engine.divergence.origin import LastCalls, Origin
from axon_nb.engine.divergence.replicas import Replicas, root_models
from axon_nb.engine.session import RankSession
from axon_nb.engine.sharding.placement import local_tensor
from axon_nb.engine.step_frames import step_depth
from axon_nb.records.protocol.cells import CellFacts
from axon_nb.records.protocol.contents import NumbersReply, NumbersRequest
from axon_nb.records.training.numbers import LAST, NonFinite
from axon_nb.shell.user_frame import inner_function, user_frame

_MAX_LOGS = 2
"""A cell may begin before the notebook has read the rest of the last one."""
_PATIENCE_S = 10.0
"""How long a rank waits for the notebook to stop the cell, before it does so itself."""
_POLL_S = 0.02


@dataclass
class _Watched:
    """An optimizer in the running cell."""

    number: int
    parameters: list[torch.Tensor]
    replicas: Replicas
    steps: int = 0
    place: str = ""


@dataclass
class _Reading:
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
    """Watches the cells of a rank.

    Args:
        session: The rank.
    """

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
        replicas, at = watched.replicas, (watched.number, watched.steps)
        for name, parameter in zip(replicas.names, watched.parameters, strict=True):
            if not _is_finite(parameter):
                return NonFinite(*at, "weight", name, where=place)
        origin = None
        with contextlib.suppress(Exception):  # a model that cannot be called twice
            origin = self._last_calls.find()
        if origin is not None:
            return self._with(NonFinite(*at, "", "", where=place), origin)
        if not all(map(math.isfinite, reading.losses)):
            return NonFinite(*at, "loss", "", where=place)
        # A backward reaches the last parameters first.
        for name, gradient in zip(reversed(replicas.names), reversed(gradients), strict=True):
            if gradient is not None and not _is_finite(gradient):
                return NonFinite(*at, "gradient", name, where=place)
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
        return dataclasses.replace(found, **dataclasses.asdict(origin) | {"where": origin.where or found.where})


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
