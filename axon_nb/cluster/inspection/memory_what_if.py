"""Questions about memory: what if there were more ranks, another strategy, another optimizer? The newest one wins.

A rank tells how its model is trained, gives its states by formula at once, and hands over the model without its data;
the notebook has `axon_nb.plan` simulate a step in a process of its own.

A question about memory in the words of `axon_nb.plan.memory`, and its answer in those of the panels.
"""

from __future__ import annotations

import atexit
import threading
import weakref
from collections.abc import Callable, Mapping
from dataclasses import replace
from importlib import import_module
from typing import TYPE_CHECKING, Any

from axon_nb.errors import AxonError, UsageError
from axon_nb.records.memory import HasClassName, LazyFunction, MemoryPrediction, MemorySetup, WhatIfState
from axon_nb.records.protocol.contents import ModelFacts, PlanReply

if TYPE_CHECKING:
    from axon_nb.plan import MemoryPlan

__all__ = ["Ask", "WhatIf", "plan_options", "read_plan"]

_ALL_RANKS = 8
"""Of so many ranks each is planned for; of more the one with the highest peak."""
_ROLES = {"other": "buffers"}


def plan_options(setup: MemorySetup, facts: ModelFacts, spec: Any) -> dict[str, Any]:
    """The arguments of `plan.memory` besides the model; no object of torch's among them.

    Args:
        setup: What is asked.
        facts: What the rank has told of the model.
        spec: `axon_nb.plan.TensorSpec`.
    """
    inputs = [_input(value, facts.setup.batch, spec) for value in facts.inputs or ()]
    tokens = facts.loss == "tokens"
    optimizer, options = setup.optimizer_arguments
    if setup.optimizer == facts.setup.optimizer:
        options = dict(facts.optimizer_options)
    recomputed = HasClassName(facts.blocks) if facts.blocks else True
    return {
        "mesh": setup.mesh,
        "strategy": setup.strategy,
        "inputs": tuple(inputs),
        # Torch's schedules cut a target into microbatches, whatever the loss makes of it.
        "target": inputs[0] if tokens or setup.pp > 1 else None,
        "loss": LazyFunction("axon_nb.parallel.models", "next_byte_loss") if tokens else None,
        "optimizer": optimizer,
        "optimizer_options": options,
        "dtype": setup.dtype or None,
        "mixed_precision": setup.mixed_precision or None,
        "cpu_offload": setup.offload,
        "batch": setup.batch,
        "activation_checkpointing": recomputed if setup.checkpointing else None,
        "wrap": None if facts.units is None else HasClassName(facts.units),
        "num_microbatches": setup.microbatches if setup.pp > 1 else None,
        "schedule": facts.schedule,
        "tp_plan": facts.tp_plan,
        "device": facts.device,
        "ranks": "all" if setup.world <= _ALL_RANKS else "worst",
    }


def _input(value: Any, batch: int, spec: Any) -> Any:
    if not isinstance(value, dict):
        return value
    first, *rest = value["shape"] or [None]
    shape = () if first is None else ("batch" if first == batch else first, *rest)
    return spec(shape, value["dtype"])


def read_plan(setup: MemorySetup, made: MemoryPlan, notes: tuple[str, ...]) -> MemoryPrediction:
    """A plan as panels show it.

    Args:
        setup: What was asked.
        made: The answer.
        notes: Sentences that come before those of the plan.
    """
    worst = made.worst
    return MemoryPrediction(
        setup,
        made.method,
        worst.rank,
        {own.rank: _by_role(own.persistent.as_dict()) for own in made.ranks},
        {own.rank: _by_role(own.peak.as_dict()) for own in made.ranks},
        f"in {worst.phase}" + (f" of {worst.module}" if worst.module else ""),
        worst.host_bytes,
        (*notes, *made.notes),
    )


def _by_role(parts: Mapping[str, int]) -> dict[str, int]:
    return {_ROLES.get(name, name): size for name, size in parts.items() if size}


_PENDING_S = 0.2
_PATIENCE_S = 120.0
_BUSY_S = 0.25
_END_S = 3.0
_STATES_ONLY = "model states only"
_HOW_CALLED = (
    "Activations are not in it: how the model is called is seen in its next forward, while this panel is open."
)
_PIPELINE = "A pipeline is simulated once it is seen in its next step, while this panel is open."
_MEAN_LOSS = "The loss is not known: the mean of the model's output stands for it."

Ask = Callable[[Mapping[str, Any] | None, str], PlanReply]
"""Asks a rank: fields of `MemorySetup` or None, and the key of the model that is here."""


class WhatIf:
    """Answers one question at a time, on a thread of its own; a newer one ends what is under way for the last.

    Args:
        ask: Asks a rank.
        show: Called with each new state, from that thread.
        busy: Whether a cell runs: what nobody has asked for is simulated afterwards.
    """

    def __init__(self, ask: Ask, show: Callable[[WhatIfState], None], busy: Callable[[], bool]) -> None:
        self._ask_rank, self._show, self._busy = ask, show, busy
        self._lock = threading.Lock()
        self._wanted: tuple[Mapping[str, Any] | None] | None = None
        self._last: tuple[Mapping[str, Any] | None] | None = None
        self._cancel = threading.Event()
        self._thread: threading.Thread | None = None
        self._state = WhatIfState()
        self._model: tuple[str, bytes] = ("", b"")
        atexit.register(_end, weakref.ref(self))

    @property
    def state(self) -> WhatIfState:
        """The last one shown."""
        return self._state

    def ask(self, asked: Mapping[str, Any] | None) -> None:
        """Answer this from now on; from any thread.

        Args:
            asked: Fields of `MemorySetup` that differ from what is; None: what is, for the bars beside the measured
                ones.
        """
        with self._lock:
            self._wanted = self._last = (asked,)
            self._cancel.set()
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="axon_nb-what-if", daemon=True)
                self._thread.start()

    def renew(self) -> None:
        """Answer the last question anew, if there was one: the model has changed."""
        if self._last is not None:
            self.ask(*self._last)

    def close(self) -> None:
        """End what is under way, and answer no more."""
        with self._lock:
            self._wanted = self._last = None
            self._cancel.set()

    def _run(self) -> None:
        while True:
            with self._lock:
                if self._wanted is None:
                    self._thread = None
                    return
                (asked,), self._wanted = self._wanted, None
                cancel = self._cancel = threading.Event()
            try:
                self._answer(asked, cancel)
            except Exception as error:  # whatever it is, the panel says it
                if not cancel.is_set():
                    self._tell(error=_sentence(error), doing="", share=None)

    def _tell(self, **changes: Any) -> None:
        self._state = replace(self._state, **changes)
        self._show(self._state)

    def _answer(self, asked: Mapping[str, Any] | None, cancel: threading.Event) -> None:
        self._tell(doing="asking a rank", share=None, error="")
        told = self._told(asked, cancel)
        if told is None:
            return
        facts, known, setup = told.facts, _known(told.facts), told.setup
        if known["as_is"] != self._state.as_is or told.model is not None:
            known["reference"] = None
        if told.refused or facts is None or setup is None:
            said = told.refused or "The rank has not answered."
            self._tell(error=said, doing="", setup=None, estimate=None, **known)
            return
        if told.model is not None:
            self._model = (told.key, told.model)
        states = None
        if told.states is not None:
            states = MemoryPrediction(setup, _STATES_ONLY, 0, {0: told.states}, host=told.host)
        if facts.inputs is None:
            seen = None if states is None else replace(states, notes=(_HOW_CALLED,))
            known["notes"] = (*known["notes"], *([_PIPELINE] if states is None else []))
            self._tell(setup=setup, estimate=seen, doing="", **known)
            return
        waits = asked is None and self._busy()
        doing = "waiting for the cell that runs" if waits else "starting"
        self._tell(setup=setup, estimate=states, doing=doing, **known)
        while asked is None and self._busy():
            if cancel.wait(_BUSY_S):
                return
        self._simulate(setup, facts, cancel)

    def _told(self, asked: Mapping[str, Any] | None, cancel: threading.Event) -> PlanReply | None:
        for _ in range(round(_PATIENCE_S / _PENDING_S)):
            told = self._ask_rank(asked, self._model[0])
            if not told.is_pending:
                return None if cancel.is_set() else told
            if cancel.wait(_PENDING_S):
                return None
        raise AxonError("The rank has not loaded its planner yet: ask again.")

    def _simulate(self, setup: MemorySetup, facts: ModelFacts, cancel: threading.Event) -> None:
        planner: Any = import_module("axon_nb.plan")  # its own imports of torch are made in another process

        def heard(share: float, text: str) -> None:
            if not cancel.is_set():
                self._tell(doing=f"simulating: {text}", share=share)

        heard(0.0, "starting")
        captured = planner.CapturedModel("model", self._model[1])
        options = plan_options(setup, facts, planner.TensorSpec)
        made = planner.memory(captured, **options, progress=heard, cancel=cancel)
        if cancel.is_set():
            return
        notes = (_MEAN_LOSS,) if facts.loss == "mean" else ()
        estimate = read_plan(setup, made, notes)
        known = {"reference": estimate} if setup == self._state.as_is else {}
        self._tell(estimate=estimate, doing="", share=None, **known)


def _end(me: weakref.ref[WhatIf]) -> None:
    """At the end of this process: the simulator's is not left behind."""
    what_if = me()
    if what_if is not None:
        what_if.close()
        if (thread := what_if._thread) is not None:
            thread.join(_END_S)


def _known(facts: ModelFacts | None) -> dict[str, Any]:
    """What a state says of the model."""
    if facts is None:
        return {"as_is": None, "notes": ()}
    return {"as_is": facts.setup, "is_trained_so": facts.is_trained_so, "notes": facts.notes}


def _sentence(error: Exception) -> str:
    text = (str(error).splitlines() or [""])[0]
    return text if isinstance(error, UsageError | AxonError) and text else f"{type(error).__name__}: {text}"
