"""Memory use of the ranks, and what it would be with more ranks, another strategy or another optimizer.

Ranks answer while they run a cell, too. A rank reports how its model is trained and, by formula, the memory of its
model states. It also sends the model without its data. The notebook then has `axon_nb.plan` simulate a training step in
a separate process. The newest request wins.
"""

from __future__ import annotations

import atexit
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any, NamedTuple

from msgspec import Struct
from msgspec.structs import replace

from axon_nb.cluster.rpc import request_all
from axon_nb.errors import AxonError, ClusterLostError, UsageError
from axon_nb.records.memory import HasClassName, LazyFunction, MemoryPrediction, MemorySetup, MemoryUse, WhatIfState
from axon_nb.records.protocol.inspection import MemoryRequest, ModelFacts, PlanReply, PlanRequest
from axon_nb.records.ranks import name_ranks, ranks_by

if TYPE_CHECKING:
    from axon_nb.cluster.state import ClusterState
    from axon_nb.plan import MemoryPlan

_TIMEOUT_S = 10.0
_PLANNER_TIMEOUT_S = 20.0
"""Ranks import the code for estimates and plans on the first request."""
_POLL_INTERVAL_S = 0.2
_MAX_PLANNED_RANKS = 8
"""Up to this world size every rank is planned; above it only the one with the highest peak."""
_ROLES = {"other": "buffers"}
_WHAT_IF_TIMEOUT_S = 120.0
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


class MemorySnapshot(Struct, frozen=True):
    """The memory of all ranks at one moment."""

    measured: Mapping[int, MemoryUse]
    """Measured use of the ranks that replied."""
    estimated: Mapping[int, MemoryUse]
    """Estimates of the ranks for which there is a formula."""
    notes: tuple[str, ...]
    """Sentences about what is unknown, and on which ranks."""
    model: str = ""
    """A key that changes if the one named model is replaced or called differently; empty: no single model was named."""
    cost_s: float = 0.0
    """CPU seconds that the reply cost a rank, at most."""


def request_memory(state: ClusterState, names: Sequence[str], *, wait_for_estimates: bool = True) -> MemorySnapshot:
    """Request what the memory of all live ranks holds.

    Args:
        state: The cluster.
        names: Modules and optimizers on the ranks; empty: everything that their variables hold.
        wait_for_estimates: Whether to wait until the ranks have imported the code for estimates.

    Raises:
        UsageError: no rank has a module or optimizer with one of these names.
        AxonError: no rank replied.
    """
    living = state.live_ranks
    deadline = time.monotonic() + (_PLANNER_TIMEOUT_S if wait_for_estimates else 0.0)
    timeout_s = _PLANNER_TIMEOUT_S if wait_for_estimates else _TIMEOUT_S
    while True:
        replies = request_all(state.connection.client, living, MemoryRequest(tuple(names)), timeout_s=timeout_s)
        if time.monotonic() >= deadline or not any(reply.is_pending for reply in replies.values()):
            break
        time.sleep(_POLL_INTERVAL_S)
    refused = replies.refused
    answered = sorted({*replies, *refused})
    if not answered:
        failures = replies.missing(replies.failed)
        raise AxonError(
            " ".join(failures)
            or f"No rank replied within {timeout_s:.0f} s. Run `%distributed status` to see what they are doing."
        )
    if not replies:
        raise UsageError(f"{name_ranks(refused).capitalize()}: {refused[answered[0]]}")
    said = {rank: (refused[rank],) if rank in refused else replies[rank].notes for rank in answered}
    notes = tuple(
        note if len(ranks) == len(answered) else f"{name_ranks(ranks).capitalize()}: {note}"
        for note, ranks in ranks_by((note, rank) for rank in answered for note in said[rank]).items()
    )
    notes = (*notes, *replies.missing(state.ranks))
    return MemorySnapshot(
        measured={rank: reply.measured for rank, reply in replies.items()},
        estimated={rank: reply.estimated for rank, reply in replies.items() if reply.estimated is not None},
        notes=notes,
        model=next(iter(replies.values())).model,
        cost_s=max(reply.spent_s for reply in replies.values()),
    )


def request_plan(state: ClusterState, names: Sequence[str], changes: Mapping[str, Any] | None, known: str) -> PlanReply:
    """Request what a memory planner needs from the first live rank.

    For a pipeline the rank with the first stage replies, and the model is assembled from the stages of all its ranks.

    Args:
        state: The cluster.
        names: A model, and its optimizers if they are named.
        changes: Fields of `MemorySetup` that differ from the current setup; None: the current setup.
        known: The key of the model that the notebook already has.

    Raises:
        ClusterLostError: the cluster is gone.
        UsageError: a name is neither a module nor an optimizer.
        AxonError: no rank is alive, or the rank did not reply.
    """
    if not state.running:
        raise ClusterLostError(
            f"The cluster {state.name!r} is gone. Run `%distributed start` to start a new one, then `%memory` again."
        )
    living = state.live_ranks[:1]
    if not living:
        raise AxonError("No rank is alive. Run `%distributed repair` to start new ones.")
    request = PlanRequest(tuple(names), changes, known)
    reply = _request_planner(state, living, request)[living[0]]
    if reply.first_rank is not None:  # the inputs of a pipeline are known on the rank with its first stage
        reply = _request_planner(state, [reply.first_rank], request)[reply.first_rank]
    if reply.ranks is None or reply.key == known:
        return reply
    return _with_stages(reply, reply.ranks, state, names)


def _request_planner(state: ClusterState, ranks: Sequence[int], request: PlanRequest) -> dict[int, PlanReply]:
    replies = request_all(state.connection.client, ranks, request, timeout_s=_PLANNER_TIMEOUT_S)
    if silent := [rank for rank in ranks if rank not in replies]:
        if replies.refused:
            raise UsageError(next(iter(replies.refused.values())))
        if failures := replies.missing(replies.failed):
            raise AxonError(" ".join(failures))
        raise AxonError(
            f"{name_ranks(silent).capitalize()} did not reply within {_PLANNER_TIMEOUT_S:.0f} s. "
            "Run `%distributed status` to see what the ranks are doing."
        )
    return replies


def _with_stages(reply: PlanReply, holders: Mapping[int, int], state: ClusterState, names: Sequence[str]) -> PlanReply:
    """Return a pipeline's reply with its model, assembled from the stages on its ranks."""
    request = PlanRequest(tuple(names), stages=True)
    replies = _request_planner(state, sorted(set(holders.values())), request)
    for rank, stage_reply in replies.items():
        if stage_reply.is_pending:
            return stage_reply
        if stage_reply.refused:
            return replace(reply, refused=f"Rank {rank}: {stage_reply.refused}")
    parts = [(replies[holders[stage]].stages or {})[stage] for stage in sorted(holders)]
    return replace(reply, model=import_module("axon_nb.plan.models").join_stages(parts))


def plan_options(setup: MemorySetup, facts: ModelFacts, spec: Any) -> dict[str, Any]:
    """Return the arguments of `plan.memory` besides the model; none of them is a torch object.

    Args:
        setup: The scenario.
        facts: What the rank reported about the model.
        spec: `axon_nb.plan.TensorSpec`.
    """
    is_split = setup.cp > 1
    inputs = [_input(value, facts.setup.batch, spec, is_split) for value in facts.inputs or ()]
    tokens = facts.loss == "tokens"
    checkpointed = HasClassName(facts.blocks) if facts.blocks else True
    return {
        **setup.plan_options(facts.setup, facts.optimizer_options),
        "inputs": tuple(inputs),
        "seq": (facts.inputs or [])[0]["shape"][1] if is_split else None,
        # Torch's schedules split a target into microbatches, whatever the loss does with it.
        "target": inputs[0] if tokens or setup.pp > 1 else None,
        "loss": LazyFunction("axon_nb.parallel.models", "next_byte_loss") if tokens else None,
        "activation_checkpointing": checkpointed if setup.activation_checkpointing else None,
        "wrap": None if facts.units is None else HasClassName(facts.units),
        "num_microbatches": setup.num_microbatches if setup.pp > 1 else None,
        "schedule": facts.schedule,
        "tp_plan": facts.tp_plan,
        "device": facts.device,
        "ranks": "all" if setup.world_size <= _MAX_PLANNED_RANKS else "worst",
    }


def _input(value: Any, batch: int, spec: Any, is_split: bool) -> Any:
    if not isinstance(value, dict):
        return value
    first, *rest = value["shape"] or [None]
    rest[:1] = ["seq"] * bool(rest) if is_split else rest[:1]
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
        for _ in range(round(_WHAT_IF_TIMEOUT_S / _POLL_INTERVAL_S)):
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
    return {"as_is": facts.setup, "is_trained_so": facts.is_trained_so, "notes": facts.notes, "axes": facts.axes}


def _sentence(error: Exception) -> str:
    text = (str(error).splitlines() or [""])[0]
    return text if isinstance(error, UsageError | AxonError) and text else f"{type(error).__name__}: {text}"
