"""The machines for which notebook 10 asks a layout, and what a search finds for each."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pandas as pd

LAYOUTS = Path(__file__).with_name("layouts.csv")
"""What `plan.search` finds for each case; `scripts/course_layouts.py` writes it, because a search takes 15 s."""

_STRATEGIES = ("ddp", "shard_grad_op", "full_shard")
_NAMES = ("dp", "tp", "pp", "strategy", "num_microbatches", "activation_checkpointing")
_DEGREES = ("dp", "tp", "pp")
_MARGIN = 1.10
"""How much longer a step may take than with the best layout; the estimate is not better than that."""


@dataclass(frozen=True, slots=True)
class Case:
    """A machine and a training, for which a layout is asked."""

    context: int
    num_gpus: int
    memory_gib: float
    global_batch: int
    rates: str
    links: str | Mapping[str, str]

    def search(self) -> pd.DataFrame:
        """Return the layouts, best first, as `SearchPlan.to_frame` has them."""
        from axon_nb import plan
        from axon_nb.parallel.models import GPTConfig

        model = GPTConfig(vocab=32_000, context=self.context, hidden=4096, heads=32, blocks=34)
        return plan.search(
            model,
            self.num_gpus,
            self.memory_gib,
            global_batch=self.global_batch,
            mixed_precision="bfloat16",
            rates=self.rates,
            links=self.links,
        ).to_frame()


CASES = {
    "10.2": Case(2048, 8, 24, 64, "a100", "pcie4"),
    "10.3": Case(2048, 64, 80, 256, "h100", {"tp": "nvlink4", "all": "ethernet-25g"}),
    "10.4": Case(16384, 64, 80, 64, "h100", "h100"),
}
"""By exercise."""


@functools.cache
def _table(exercise: str) -> pd.DataFrame:
    import pandas as pd

    table = pd.read_csv(LAYOUTS, dtype={"exercise": str}, keep_default_na=False)
    return table[table.exercise == exercise]


class ProposedLayout:
    """A learner's layout, and the row of the search that is equal to it."""

    def __init__(self, exercise: str, answer: Any) -> None:
        self.case, self.table, self.answer = CASES[exercise], _table(exercise), answer
        self.best_ms = float(self.table[self.table.fits].step_ms.min())

    def named(self) -> str | None:
        """Whether the six names are there, with values that make sense."""
        if not isinstance(self.answer, Mapping) or set(self.answer) != set(_NAMES):
            return f"it must be a dictionary with the names {', '.join(_NAMES)}"
        for name in (*_DEGREES, "num_microbatches"):
            if type(self.answer[name]) is not int or self.answer[name] < 1:
                return f"{name} is {self.answer[name]!r}; it must be a whole number, at least 1"
        if self.answer["strategy"] not in _STRATEGIES:
            return f"strategy is {self.answer['strategy']!r}; it must be one of {', '.join(_STRATEGIES)}"
        return None

    def uses_all(self) -> str | None:
        """Whether the degrees multiply to the number of GPUs, and the batch can be shared out."""
        dp, tp, pp = (self.answer[name] for name in _DEGREES)
        if dp * tp * pp != self.case.num_gpus:
            return f"dp × tp × pp is {dp * tp * pp}; there are {self.case.num_gpus} GPUs"
        parts = dp * self.answer["num_microbatches"]
        if self.case.global_batch % parts:
            return f"a batch of {self.case.global_batch} cannot be cut into {parts} microbatches"
        if self.row is None:
            return "plan.search does not try this: see what it says about pipelines, microbatches and hosts of 8 GPUs"
        return None

    def fits(self) -> str | None:
        """Whether it needs no more memory than there is."""
        row = self.row
        return None if row is None or row.fits else str(row.reason)

    def is_fast(self) -> str | None:
        """Whether a step takes at most 10 % longer than the best."""
        row = self.row
        if row is None or row.step_ms <= _MARGIN * self.best_ms:
            return None
        more = row.step_ms / self.best_ms - 1
        return f"a step takes {row.step_ms:,.0f} ms; the best takes {self.best_ms:,.0f} ms, and this {more:.0%} longer"

    @property
    def row(self) -> Any:
        """The row of the table; None: the search has no such layout."""
        table = self.table
        for name in _NAMES:
            table = table[table[name] == self.answer[name]]
        return table.iloc[0] if len(table) else None
