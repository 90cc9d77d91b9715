"""Makes many plans in one simulator process."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from axon_nb.errors import UsageError
from axon_nb.plan.footprint.plan import MemoryPlan, MemoryRequest
from axon_nb.plan.footprint.simulate import simulate


def plans(requests: Mapping[str, MemoryRequest], report: Callable[[float, str], None]) -> dict[str, MemoryPlan | str]:
    """Return each request's plan, or its error."""
    found: dict[str, MemoryPlan | str] = {}
    for name, request in requests.items():
        try:
            found[name] = simulate(request.check(), report)
        except UsageError as error:
            found[name] = f"{type(error).__name__}: {error}"
    return found
