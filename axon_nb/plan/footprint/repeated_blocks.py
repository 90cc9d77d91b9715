"""Models of many equal blocks: extrapolates their memory from two depths.

Memory by module is that of the full model, even if the model that ran lacks most blocks.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from axon_nb.plan.footprint.parts import PARTS, MemoryParts, ModuleMemory
from axon_nb.plan.footprint.replay import Key, Moment
from axon_nb.plan.repetition.alike import BlockRun

DEPTHS = (4, 5)
"""Depths of the two versions that run: FSDP holds up to three units at once, at either end."""
ENDS = 2
"""Number of groups of blocks at either end whose moments are distinguished."""


def moment_key(run: BlockRun | None, depth: int) -> Any:
    """Return a function that names moments so that moments of different depths correspond.

    Args:
        run: The blocks; None: all moments of a phase share one name.
        depth: Number of groups present.

    Returns:
        A stateful function from phase and module, called in time order, to a `Key`.
    """
    period = 1 if run is None else run.period
    places = {} if run is None else {name: number for number, name in enumerate(run.names[: depth * run.period])}
    phase_now, block_now, seen = "", -1, False

    def key(phase: str, module: str) -> Key:
        nonlocal phase_now, block_now, seen
        if phase != phase_now:
            phase_now, block_now, seen = phase, -1, False
        block = _block_of(module, places)
        if block is not None:
            block_now, seen = block, True
        elif module and seen:
            block_now = -1
        if block_now < 0:
            return phase, "after" if seen else "before", 0
        is_first = block_now < ENDS * period
        return (phase, "first", block_now) if is_first else (phase, "last", depth * period - block_now)

    return key


def _block_of(module: str, places: dict[str, int]) -> int | None:
    while module:
        if module in places:
            return places[module]
        module = module.rpartition(".")[0]
    return None


def extrapolate_peak(
    short: dict[Key, Moment], long: dict[Key, Moment], run: BlockRun, *, optimizer: int | None = None
) -> Moment | None:
    """Return the peak of the full model, extrapolated from two shorter versions.

    The bytes held at corresponding moments are linear in the number of blocks. Between the first and the last blocks
    they are linear in the block too, so the highest moment is at an end.

    Args:
        short: Moments of the version with fewer blocks.
        long: Moments of the other version.
        run: The blocks of the full model.
        optimizer: Bytes of the optimizer states, if known; None: extrapolate them as well.

    Returns:
        The peak; None if the two versions have different moments.
    """
    if short.keys() - long.keys():
        return None
    moments = [
        Moment(
            extrapolate_parts(short[key].parts, long[key].parts, run.depth, optimizer=optimizer),
            long[key].phase,
            full_model_name(long[key].module, run, DEPTHS[1]),
            _outside_activations(short[key], long[key], run),
        )
        for key in short
    ]
    return max(moments, key=lambda moment: moment.parts.total)


def _outside_activations(short: Moment, long: Moment, run: BlockRun) -> dict[str, int]:
    """Activations by module; those that modules outside the blocks make between blocks grow with their number."""
    inside = set(run.names)
    activations = dict(long.activations)
    for name, size in long.activations.items():
        if not any(name == block or name.startswith(f"{block}.") for block in inside):
            activations[name] = _on_line(short.activations.get(name, 0), size, run.depth)
    return activations


def _on_line(first: int, second: int, depth: int) -> int:
    """Return the value at `depth` on the line through those at `DEPTHS`."""
    return round(first + (depth - DEPTHS[0]) / (DEPTHS[1] - DEPTHS[0]) * (second - first))


def extrapolate_parts(
    short: MemoryParts, long: MemoryParts, depth: int, *, optimizer: int | None = None
) -> MemoryParts:
    """Return the parts at `depth`, on the line through those at `DEPTHS`; `optimizer` overrides its part."""
    values = {part: _on_line(getattr(short, part), getattr(long, part), depth) for part in PARTS}
    return MemoryParts(**values | ({} if optimizer is None else {"optimizer": optimizer}))


def full_model_name(module: str, run: BlockRun, depth: int) -> str:
    """Return the full model's name of a module in a version of `depth` groups, which keeps the last blocks last."""
    count = depth * run.period
    for number in range(ENDS * run.period, count):
        name = run.names[number]
        if module == name or module.startswith(f"{name}."):
            return run.names[len(run.names) - count + number] + module[len(name) :]
    return module


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
        depth: Number of groups in `states`.
    """
    rows = [
        ModuleMemory(name, *states.get(name, (0, 0, 0)), activations.get(name, 0))
        for name in dict.fromkeys([*states, *activations])
    ]
    rows = [row for row in rows if row.parameters or row.activations]
    if run is None:
        return tuple(rows)
    blocks: list[list[ModuleMemory]] = [[] for _ in range(depth * run.period)]
    before: list[ModuleMemory] = []
    after: list[ModuleMemory] = []
    for row in rows:
        number = _block_index(row.name, run, depth)
        if number is not None:
            blocks[number].append(row)
        else:
            (after if any(blocks) else before).append(row)
    repeated = [row for number in range(len(run.names)) for row in _block_rows(blocks, run, depth, number)]
    return (*before, *repeated, *after)


def _block_rows(blocks: list[list[ModuleMemory]], run: BlockRun, depth: int, number: int) -> list[ModuleMemory]:
    """The rows of one block of the full model, copied from an end block or from one in between."""
    from_end, ends = len(run.names) - number, ENDS * run.period
    between = ends + number % run.period
    source = number if number < ends else depth * run.period - from_end if from_end <= ends else between
    old, new = run.names[source], run.names[number]
    return [
        ModuleMemory(new + row.name[len(old) :], row.parameters, row.gradients, row.optimizer, row.activations)
        for row in blocks[source]
    ]


def _block_index(name: str, run: BlockRun, depth: int) -> int | None:
    for number, block in enumerate(run.names[: depth * run.period]):
        if name == block or name.startswith(f"{block}."):
            return number
    return None
