"""Finds the blocks of a model that are proven alike, singly or in groups, and removes some of them.

Blocks are alike if their state is equal (`signature`), their forwards do the same with tensors from corresponding
places, and the work between them is equal, too (`forward_trace`). A model without some of them must do the same before,
in and after those that remain. Models such as Gemma repeat a group: five local blocks and a global one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from axon_nb.parallel.data.blocks import num_parameters, rows_of_blocks
from axon_nb.plan.repetition.forward_trace import ForwardTrace, sections, trace_forward
from axon_nb.plan.repetition.signature import signatures

_MAX_PERIOD = 16
"""Blocks in the largest group that is looked for."""


@dataclass(frozen=True, slots=True)
class BlockRun:
    """Consecutive blocks of a model, equal except for their weights; or equal groups of blocks."""

    names: tuple[str, ...]
    """Their names in the model."""
    period: int = 1
    """Number of blocks in a group; each is equal to the one at its place in any other group."""

    @property
    def depth(self) -> int:
        """Number of groups."""
        return len(self.names) // self.period

    def __str__(self) -> str:
        of = f"groups of {self.period} blocks" if self.period > 1 else "blocks"
        return f"{self.depth} equal {of}"


def shorten(model: nn.Module, run: BlockRun, depth: int) -> None:
    """Remove all but the first `depth` groups of a run."""
    path = run.names[0].rpartition(".")[0]
    container = model.get_submodule(path)
    for name in run.names[depth * run.period :]:
        del container._modules[name.rpartition(".")[2]]


class ProvenRuns:
    """The runs of a model whose blocks are proven alike.

    Args:
        model: The model on tensors without data, before it is wrapped.
        forward: Runs the forward and the loss of a model.
        labels: What else distinguishes modules, such as how they are wrapped.
    """

    def __init__(
        self,
        model: nn.Module,
        forward: Callable[[nn.Module], Any],
        labels: Callable[[nn.Module], Any] | None = None,
    ) -> None:
        self._model = model
        self._forward = forward
        self._labels = labels
        self.reason = ""
        """Why there is no run, for a model of many blocks."""

    def find(self, *, least: int, make: Callable[[BlockRun, int], nn.Module], depth: int) -> BlockRun | None:
        """Return the run with the most parameters in what can be left out; None if there is none.

        Args:
            least: Number of groups that a run must have.
            make: Makes the model with only some groups of a run.
            depth: How many groups such a model has to have to prove that the others can be left out.
        """
        rows: list[dict[str, nn.Module]] = []
        for row in rows_of_blocks(self._model):
            is_inner = any(next(iter(row), "").startswith(f"{name}.") for outer in rows for name in outer)
            if len(row) >= least and num_parameters(list(row.values())) and not is_inner:
                rows.append(row)
        if not rows:
            return None
        blocks = {name: block for row in rows for name, block in row.items()}
        states = {tuple(row): signatures(self._model, list(row.values()), self._labels) for row in rows}
        trace = self._traced(self._model, blocks)
        if trace is None:
            self.reason = "its forward cannot be traced block by block"
            return None
        runs = [run for row in rows for run in _runs(trace, row, states[tuple(row)], least)]
        for run in sorted(
            runs, key=lambda run: -num_parameters([blocks[name] for name in run.names[depth * run.period :]])
        ):
            row_names = next(list(row) for row in rows if run.names[0] in row)
            if self._holds(trace, row_names, run, make(run, depth), depth):
                return run
        count = max(map(len, rows))
        self.reason = f"its {count} blocks of class {type(next(iter(rows[0].values()))).__name__} are not alike"
        return None

    def _holds(self, trace: ForwardTrace, row: list[str], run: BlockRun, short: nn.Module, depth: int) -> bool:
        """Return whether a shortened model does the same as the full one, apart from the blocks left out."""
        gone = set(run.names[depth * run.period :])
        kept = [name for name in row if name not in gone]
        other = self._traced(short, {name: short.get_submodule(name) for name in kept})
        whole, part = sections(trace, row), sections(other, kept) if other else None
        if whole is None or part is None:
            return False
        stay = [section for name, section in zip(row, whole[0], strict=True) if name not in gone]
        return stay == part[0] and whole[1] == part[1]

    def _traced(self, model: nn.Module, blocks: Mapping[str, nn.Module]) -> ForwardTrace | None:
        try:
            return trace_forward(model, dict(blocks), lambda: self._forward(model))
        except Exception:
            return None  # the simulation of all blocks reports what is wrong


def _runs(trace: ForwardTrace, row: Mapping[str, nn.Module], states: list[Any], least: int) -> Iterator[BlockRun]:
    """Yield the longest run of each period, as far as it has enough groups."""
    names = list(row)
    divided = sections(trace, names)
    if divided is None:
        return
    kinds = _numbered([(state, section.inside) for state, section in zip(states, divided[0], strict=True)])
    joints = _numbered([section.before for section in divided[0]])
    for period in range(1, min(_MAX_PERIOD, len(names) // least) + 1):
        first, length = _longest(kinds, joints, period)
        if length // period >= least:
            yield BlockRun(tuple(names[first : first + length // period * period]), period)


def _longest(kinds: list[int], joints: list[int], period: int) -> tuple[int, int]:
    """First block and length of the longest stretch in which each block equals that `period` earlier."""
    best, first = (0, 0), 0
    for number in range(len(kinds)):
        if number - period >= first:
            same_joint = joints[number] == joints[number - period] or number - period == first
            if kinds[number] != kinds[number - period]:
                first = number - period + 1
            elif not same_joint:
                first = number - period
        if number + 1 - first > best[1]:
            best = first, number + 1 - first
    return best


def _numbered(values: list[Any]) -> list[int]:
    """Return numbers that are equal where the values are."""
    known_values: list[Any] = []
    numbers = []
    for value in values:
        numbers.append(next((number for number, known in enumerate(known_values) if known == value), len(known_values)))
        if numbers[-1] == len(known_values):
            known_values.append(value)
    return numbers
