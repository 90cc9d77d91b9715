"""Memory by module of the full model, from a version that may lack most blocks."""

from __future__ import annotations

from collections.abc import Mapping

from axon_nb.plan.memory_record import ModuleMemory
from axon_nb.plan.simulate_depth import ENDS, BlockRun

__all__ = ["module_rows"]


def module_rows(
    states: Mapping[str, tuple[int, int, int]],
    activations: Mapping[str, int],
    run: BlockRun | None = None,
    depth: int = 0,
) -> tuple[ModuleMemory, ...]:
    """Return a row for each module with any memory.

    Args:
        states: Bytes of parameters, gradients and optimizer states by module.
        activations: Bytes alive at the peak, by the module that made them.
        run: The equal blocks of the full model; None: `states` has all of them.
        depth: Number of blocks in `states`.
    """
    rows = [
        ModuleMemory(name, *states.get(name, (0, 0, 0)), activations.get(name, 0))
        for name in dict.fromkeys([*states, *activations])
    ]
    rows = [row for row in rows if row.parameters or row.activations]
    if run is None:
        return tuple(rows)
    blocks: list[list[ModuleMemory]] = [[] for _ in range(depth)]
    before: list[ModuleMemory] = []
    after: list[ModuleMemory] = []
    for row in rows:
        number = _block_index(row.name, run, depth)
        if number is not None:
            blocks[number].append(row)
        else:
            (after if any(blocks) else before).append(row)
    repeated = [row for number in range(run.depth) for row in _block_rows(blocks, run, depth, number)]
    return (*before, *repeated, *after)


def _block_rows(blocks: list[list[ModuleMemory]], run: BlockRun, depth: int, number: int) -> list[ModuleMemory]:
    """The rows of one block of the full model, copied from an end block or from one in between."""
    from_end = run.depth - number
    source = number if number < ENDS else depth - from_end if from_end <= ENDS else ENDS
    old, new = run.names[source], run.names[number]
    return [
        ModuleMemory(new + row.name[len(old) :], row.parameters, row.gradients, row.optimizer, row.activations)
        for row in blocks[source]
    ]


def _block_index(name: str, run: BlockRun, depth: int) -> int | None:
    for number, block in enumerate(run.names[:depth]):
        if name == block or name.startswith(f"{block}."):
            return number
    return None
