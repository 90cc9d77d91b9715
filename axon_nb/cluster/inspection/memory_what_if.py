"""What-if scenarios for memory: more ranks, another strategy, another optimizer. The newest request wins.

A rank reports how its model is trained and, by formula, the memory of its model states. It also sends the model without
its data. The notebook then has `axon_nb.plan` simulate a training step in a separate process.
"""

from __future__ import annotations

import atexit
import threading
import weakref
from collections.abc import Callable, Mapping
from dataclasses import replace
from importlib import import_module
from typing import TYPE_CHECKING, Any, NamedTuple

from axon_nb.errors import AxonError, UsageError
from axon_nb.records.memory import HasClassName, LazyFunction, MemoryPrediction, MemorySetup, WhatIfState
from axon_nb.records.protocol.contents import ModelFacts, PlanReply

if TYPE_CHECKING:
    from axon_nb.plan import MemoryPlan

_MAX_PLANNED_RANKS = 8
"""Up to this world size every rank is planned; above it only the one with the highest peak."""
_ROLES = {"other": "buffers"}
_POLL_INTERVAL_S = 0.2
_PLANNER_TIMEOUT_S = 120.0
_BUSY_POLL_INTERVAL_S = 0.25
_JOIN_TIMEOUT_S = 3.0
_STATES_ONLY = "model states only"
_NO_INPUTS = (
    "Activations are not included: the panel learns how the model is called from its next forward, while it is open."
)
_NO_PIPELINE_STEP = "The pipeline can be simulated after its next step, while this panel is open."
_MEAN_LOSS = "The loss is unknown: the mean of the model's output is used instead."

RequestPlan = Callable[[Mapping[str, Any] | None, str], PlanReply]
"""Sends a `PlanRequest` to a rank and returns its reply.

The arguments are the changed fields of `MemorySetup` or None, and the key of the model that the notebook already has.
"""


def plan_options(setup: MemorySetup, facts: ModelFacts, spec: Any) -> dict[str, Any]:
    """Return the arguments of `plan.memory` besides the model; none of them is a torch object.

    Args:
        setup: The scenario.
        facts: What the rank reported about the model.
        spec: `axon_nb.plan.TensorSpec`.
    """
    inputs = [_input(value, facts.setup.batch, spec) for value in facts.inputs or ()]
    tokens = facts.loss == "tokens"
    optimizer, options = setup.optimizer_arguments
    if setup.optimizer == facts.setup.optimizer:
        options = dict(facts.optimizer_options)
    checkpointed = HasClassName(facts.blocks) if facts.blocks else True
    return {
        "mesh": setup.mesh,
        "strategy": setup.strategy,
        "inputs": tuple(inputs),
        # Torch's schedules split a target into microbatches, whatever the loss does with it.
        "target": inputs[0] if tokens or setup.pp > 1 else None,
        "loss": LazyFunction("axon_nb.parallel.models", "next_byte_loss") if tokens else None,
        "optimizer": optimizer,
        "optimizer_options": options,
        "dtype": setup.dtype or None,
        "mixed_precision": setup.mixed_precision or None,
        "cpu_offload": setup.cpu_offload,
        "batch": setup.batch,
        "activation_checkpointing": checkpointed if setup.activation_checkpointing else None,
        "wrap": None if facts.units is None else HasClassName(facts.units),
        "num_microbatches": setup.num_microbatches if setup.pp > 1 else None,
        "schedule": facts.schedule,
        "tp_plan": facts.tp_plan,
        "device": facts.device,
        "ranks": "all" if setup.world_size <= _MAX_PLANNED_RANKS else "worst",
    }


def _input(value: Any, batch: int, spec: Any) -> Any:
    if not isinstance(value, dict):
        return value
    first, *rest = value["shape"] or [None]
    shape = () if first is None else ("batch" if first == batch else first, *rest)
    return spec(shape, value["dtype"])


def read_plan(setup: MemorySetup, plan: MemoryPlan, notes: tuple[str, ...]) -> MemoryPrediction:
    """Convert a plan to the record that panels show.

    Args:
        setup: The scenario.
        plan: Its plan.
        notes: Sentences to show before the notes of the plan.
    """
    worst = plan.worst
    return MemoryPrediction(
        setup,
        plan.method,
        worst.rank,
        {usage.rank: _by_role(usage.persistent.as_dict()) for usage in plan.ranks},
        {usage.rank: _by_role(usage.peak.as_dict()) for usage in plan.ranks},
        f"in {worst.phase}" + (f" of {worst.module}" if worst.module else ""),
        worst.host_bytes,
        (*notes, *plan.notes),
    )


def _by_role(parts: Mapping[str, int]) -> dict[str, int]:
    return {_ROLES.get(name, name): size for name, size in parts.items() if size}


class _Scenario(NamedTuple):
    changes: Mapping[str, Any] | None
    """Fields of `MemorySetup` that differ from the current setup; None: the current setup."""


class WhatIf:
    """Plans one scenario at a time, on its own thread; a newer request cancels the one in progress.

    Args:
        request_plan: Sends a request to a rank.
        show: Called with each new state, from that thread.
        is_busy: Whether a cell is running: the current setup is simulated after it, requested scenarios at once.
    """

    def __init__(
        self, request_plan: RequestPlan, show: Callable[[WhatIfState], None], is_busy: Callable[[], bool]
    ) -> None:
        self._request_plan, self._show, self._is_busy = request_plan, show, is_busy
        self._lock = threading.Lock()
        self._pending: _Scenario | None = None
        self._last: _Scenario | None = None
        self._cancel = threading.Event()
        self._thread: threading.Thread | None = None
        self._state = WhatIfState()
        self._model: tuple[str, bytes] = ("", b"")
        atexit.register(_close_at_exit, weakref.ref(self))

    @property
    def state(self) -> WhatIfState:
        """The last state shown."""
        return self._state

    def request(self, changes: Mapping[str, Any] | None) -> None:
        """Plan this scenario, and drop the previous one; callable from any thread.

        Args:
            changes: Fields of `MemorySetup` that differ from the current setup; None: the current setup, for the bars
                beside the measured ones.
        """
        with self._lock:
            self._pending = self._last = _Scenario(changes)
            self._cancel.set()
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="axon_nb-what-if", daemon=True)
                self._thread.start()

    def repeat(self) -> None:
        """Repeat the last request, if there was one, because the model has changed."""
        if self._last is not None:
            self.request(self._last.changes)

    def close(self) -> None:
        """Cancel the request in progress, and plan no more."""
        with self._lock:
            self._pending = self._last = None
            self._cancel.set()

    def _run(self) -> None:
        while True:
            with self._lock:
                if self._pending is None:
                    self._thread = None
                    return
                changes, self._pending = self._pending.changes, None
                cancel = self._cancel = threading.Event()
            try:
                self._plan(changes, cancel)
            except Exception as error:  # the panel shows any error
                if not cancel.is_set():
                    self._update(error=_sentence(error), doing="", share=None)

    def _update(self, **changes: Any) -> None:
        self._state = replace(self._state, **changes)
        self._show(self._state)

    def _plan(self, changes: Mapping[str, Any] | None, cancel: threading.Event) -> None:
        self._update(doing="asking a rank", share=None, error="")
        reply = self._await_reply(changes, cancel)
        if reply is None:
            return
        facts, setup, about = reply.facts, reply.setup, _about_model(reply.facts)
        if about["as_is"] != self._state.as_is or reply.model is not None:
            about["reference"] = None
        if reply.refused or facts is None or setup is None:
            reason = reply.refused or "The rank did not reply."
            self._update(error=reason, doing="", setup=None, estimate=None, **about)
            return
        if reply.model is not None:
            self._model = (reply.key, reply.model)
        states = None
        if reply.states is not None:
            states = MemoryPrediction(setup, _STATES_ONLY, 0, {0: reply.states}, host=reply.host)
        if facts.inputs is None:
            estimate = None if states is None else replace(states, notes=(_NO_INPUTS,))
            about["notes"] = (*about["notes"], *([_NO_PIPELINE_STEP] if states is None else []))
            self._update(setup=setup, estimate=estimate, doing="", **about)
            return
        must_wait = changes is None and self._is_busy()
        doing = "waiting for the running cell" if must_wait else "starting"
        self._update(setup=setup, estimate=states, doing=doing, **about)
        while changes is None and self._is_busy():
            if cancel.wait(_BUSY_POLL_INTERVAL_S):
                return
        self._simulate(setup, facts, cancel)

    def _await_reply(self, changes: Mapping[str, Any] | None, cancel: threading.Event) -> PlanReply | None:
        """Request until the rank has imported its planner; None if the request is cancelled meanwhile."""
        for _ in range(round(_PLANNER_TIMEOUT_S / _POLL_INTERVAL_S)):
            reply = self._request_plan(changes, self._model[0])
            if not reply.is_pending:
                return None if cancel.is_set() else reply
            if cancel.wait(_POLL_INTERVAL_S):
                return None
        raise AxonError("The rank is still importing its planner: try again.")

    def _simulate(self, setup: MemorySetup, facts: ModelFacts, cancel: threading.Event) -> None:
        planner: Any = import_module("axon_nb.plan")  # it imports torch in another process

        def on_progress(share: float, text: str) -> None:
            if not cancel.is_set():
                self._update(doing=f"simulating: {text}", share=share)

        on_progress(0.0, "starting")
        captured = planner.CapturedModel("model", self._model[1])
        options = plan_options(setup, facts, planner.TensorSpec)
        plan = planner.memory(captured, **options, progress=on_progress, cancel=cancel)
        if cancel.is_set():
            return
        notes = (_MEAN_LOSS,) if facts.loss == "mean" else ()
        estimate = read_plan(setup, plan, notes)
        reference = {"reference": estimate} if setup == self._state.as_is else {}
        self._update(estimate=estimate, doing="", share=None, **reference)


def _close_at_exit(reference: weakref.ref[WhatIf]) -> None:
    """Stop the simulation when this process exits, so that its process is not left behind."""
    what_if = reference()
    if what_if is not None:
        what_if.close()
        if (thread := what_if._thread) is not None:
            thread.join(_JOIN_TIMEOUT_S)


def _about_model(facts: ModelFacts | None) -> dict[str, Any]:
    """Return the fields of a `WhatIfState` that describe the model."""
    if facts is None:
        return {"as_is": None, "notes": ()}
    return {"as_is": facts.setup, "is_trained_so": facts.is_trained_so, "notes": facts.notes}


def _sentence(error: Exception) -> str:
    text = (str(error).splitlines() or [""])[0]
    return text if isinstance(error, UsageError | AxonError) and text else f"{type(error).__name__}: {text}"
