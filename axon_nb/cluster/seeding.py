"""`seed`: the random generators of all ranks, alike or each its own."""

from __future__ import annotations

from typing import TYPE_CHECKING

from axon_nb.errors import UsageError
from axon_nb.records.ranks import format_ranks

if TYPE_CHECKING:
    from axon_nb.cluster.cell_manager import CellManager

__all__ = ["seed"]

_MAX = (1 << 63) - 1


def seed(cells: CellManager, value: int, *, per_rank: bool = False) -> str:
    """Seed `random`, NumPy and torch (every device) on all ranks; says what was done.

    Args:
        cells: The cells of the cluster.
        value: The seed.
        per_rank: Whether each rank gets the sum of `value` and its number.

    Raises:
        UsageError: a seed that torch does not take.
    """
    if not 0 <= value <= _MAX - cells.state.world_size:
        raise UsageError(f"seed {value}: it is a whole number from 0 to {_MAX - cells.state.world_size}.")
    call = f"seed({value}, per_rank={per_rank})"
    cells.run(f"__import__('axon_nb.engine.seeding', fromlist=['seed']).{call}", quiet=True)
    what = f"random, numpy and torch are seeded on ranks {format_ranks(cells.state.ranks)}"
    if per_rank:
        return f"{what}: with {value} on rank 0, {value + 1} on rank 1 and so on."
    return f"{what}, all with {value}."
