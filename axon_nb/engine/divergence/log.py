"""The digests of the last steps of one cell, until the notebook has compared them with those of other ranks."""

from __future__ import annotations

import hashlib
from array import array
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from axon_nb.engine.divergence.replicas import Replicas
from axon_nb.records.ranks import Runs, pack_ranks
from axon_nb.records.training.numbers import NonFinite, StepNumbers

_MAX_BYTES = 32 << 20
_MIN_ROWS, _MAX_ROWS = 64, 4096


@dataclass(frozen=True, slots=True)
class Row:
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
