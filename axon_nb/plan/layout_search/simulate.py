"""Simulates the best layouts of a search, all in one process."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import cloudpickle

from axon_nb.errors import UsageError
from axon_nb.plan.errors import PlanError
from axon_nb.plan.footprint.plan import MemoryPlan
from axon_nb.plan.footprint.request import MemoryRequest
from axon_nb.plan.layout_search.memory import ALLOWANCE
from axon_nb.plan.layout_search.plan import Candidate, SearchPlan
from axon_nb.plan.models import check_model, dtype_name
from axon_nb.plan.process.worker import run_in_process


@dataclass(frozen=True)
class Simulations:
    """Simulates layouts of a model."""

    model: Any
    options: Mapping[str, Any]
    """Fields of `MemoryRequest` that all layouts share."""
    limit: float
    """Bytes of memory per rank."""
    progress: Callable[[float, str], None] | None = None
    cancel: threading.Event | None = None

    def simulate_best(self, plan: SearchPlan, count: int) -> SearchPlan:
        """Return the search with its best layouts simulated and still fitting.

        Args:
            plan: A plan with estimated memory.
            count: How many of the best to simulate.

        Raises:
            PlanError: the model cannot be sent to the simulator process.
            SimulatorError: that process failed.
            PlanCancelledError: it was cancelled.
        """
        check_model(self.model)
        candidates, refused = list(plan.candidates), set[int]()
        while True:
            candidates.sort(key=lambda one: one.sort_key)
            best = [one for one in candidates if one.fits and id(one) not in refused][:count]
            todo = [one for one in best if not one.simulated]
            if not todo:
                return replace(plan, candidates=tuple(candidates))
            for one, answer in zip(todo, self._answers(todo, plan.global_batch), strict=True):
                if isinstance(answer, str):
                    refused.add(id(one))
                else:
                    candidates[next(n for n, other in enumerate(candidates) if other is one)] = self._evaluated(
                        one, answer
                    )

    def _evaluated(self, one: Candidate, answer: MemoryPlan) -> Candidate:
        parts = {name: size for name, size in answer.worst.peak.as_dict().items() if size}
        return replace(one, simulated=True).with_result(parts, one.step_s, self.limit)

    def _answers(self, todo: Sequence[Candidate], batch: int) -> list[MemoryPlan | str]:
        requests = [self._request(one, batch) for one in todo]
        try:
            task = cloudpickle.dumps(requests)
        except Exception as error:
            raise PlanError(
                f"The model, its inputs or its loss cannot be sent to another process ({error}): give functions that "
                "make what they need, or use simulate=0."
            ) from error
        return run_in_process(simulate_all, task, progress=self.progress, cancel=self.cancel)

    def _request(self, one: Candidate, batch: int) -> MemoryRequest:
        options = dict(self.options)
        mixed = options.pop("mixed_precision")
        return MemoryRequest(
            self.model,
            **one.layout(batch),
            mixed_precision=None if mixed is None else dtype_name(mixed, "mixed_precision"),
            fragmentation=ALLOWANCE,
            **options,
        )


def simulate_all(requests: Sequence[MemoryRequest], report: Callable[[float, str], None]) -> list[MemoryPlan | str]:
    """Simulate each request; runs in the simulator process.

    Args:
        requests: Not checked yet.
        report: Called with the fraction done and the next step.

    Returns:
        For each request its plan, or why it cannot be simulated.
    """
    from axon_nb.plan.footprint.simulate import simulate

    plans: list[MemoryPlan | str] = []
    for number, request in enumerate(requests):

        def report_layout(share: float, text: str, number: int = number) -> None:
            report((number + share) / len(requests), f"layout {number + 1} of {len(requests)}: {text}")

        try:
            plans.append(simulate(request.check(), report_layout))
        except UsageError as error:
            plans.append(str(error))
    return plans
