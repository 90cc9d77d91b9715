"""Models of many equal blocks: finds the blocks, shortens the model, and extrapolates from two depths.

Memory by module is that of the full model, even if the model that ran lacks most blocks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from axon_nb.plan.footprint.plan import PARTS, MemoryParts, ModuleMemory
from axon_nb.plan.footprint.replay import Key, Moment

__all__ = [
    "DEPTHS",
    "ENDS",
    "BlockRun",
    "extrapolate_parts",
    "extrapolate_peak",
    "find_block_run",
    "module_rows",
    "moment_key",
    "shorten",
]

DEPTHS = (4, 5)
"""Depths of the two versions that run: FSDP holds up to three units at once, at either end."""
ENDS = 2
"""Number of blocks at either end whose moments are distinguished."""
_ROWS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)


@dataclass(frozen=True, slots=True)
class BlockRun:
    """Consecutive blocks of a model, equal except for their weights."""

    names: tuple[str, ...]
    """Their names in the model."""

    @property
    def depth(self) -> int:
        """Number of blocks."""
        return len(self.names)


def find_block_run(model: nn.Module, *, least: int) -> BlockRun | None:
    """Return the row of equal blocks with the most parameters; None if none has `least` blocks."""
    best: tuple[int, BlockRun] | None = None
    for path, container in model.named_modules():
        if not isinstance(container, _ROWS):
            continue
        for names in _equal_rows(container):
            blocks = [container.get_submodule(name) for name in names]
            elements = sum(parameter.numel() for block in blocks for parameter in block.parameters())
            if len(names) >= least and elements and (best is None or elements > best[0]) and _share_nothing(blocks):
                best = elements, BlockRun(tuple(f"{path}.{name}" if path else name for name in names))
    return None if best is None else best[1]


def _equal_rows(container: nn.Module) -> list[list[str]]:
    rows: list[list[str]] = []
    last: Any = None
    for name, child in container.named_children():
        signature = _signature(child)
        if signature != last:
            rows.append([])
        rows[-1].append(name)
        last = signature
    return rows


def _signature(module: nn.Module) -> tuple[Any, ...]:
    tensors = (*module.named_parameters(), *module.named_buffers())
    shapes = tuple((name, tuple(item.shape), item.dtype, item.requires_grad) for name, item in tensors)
    return type(module), repr(module), shapes


def _share_nothing(blocks: list[nn.Module]) -> bool:
    """Return whether no two blocks share a parameter."""
    ids = [{id(parameter) for parameter in block.parameters()} for block in blocks]
    return sum(map(len, ids)) == len(set().union(*ids))


def shorten(model: nn.Module, run: BlockRun, depth: int) -> None:
    """Remove all but the first `depth` blocks of a row."""
    path = run.names[0].rpartition(".")[0]
    container = model.get_submodule(path)
    for name in reversed(run.names[depth:]):
        del container._modules[name.rpartition(".")[2]]


def moment_key(run: BlockRun | None, depth: int) -> Any:
    """Return a function that names moments so that moments of different depths correspond.

    Args:
        run: The blocks; None: all moments of a phase share one name.
        depth: Number of blocks present.

    Returns:
        A stateful function from phase and module, called in time order, to a `Key`.
    """
    places = {} if run is None else {name: number for number, name in enumerate(run.names[:depth])}
    phase_now, block_now, seen = "", -1, False

    def key(phase: str, module: str) -> Key:
        nonlocal phase_now, block_now, seen
        if phase != phase_now:
            phase_now, block_now, seen = phase, -1, False
        found = _block_of(module, places)
        if found is not None:
            block_now, seen = found, True
        elif module and seen:
            block_now = -1
        if block_now < 0:
            return phase, "after" if seen else "before", 0
        return (phase, "first", block_now) if block_now < ENDS else (phase, "last", depth - block_now)

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
            long[key].activations,
        )
        for key in short
    ]
    return max(moments, key=lambda moment: moment.parts.total)


def extrapolate_parts(
    short: MemoryParts, long: MemoryParts, depth: int, *, optimizer: int | None = None
) -> MemoryParts:
    """Return the parts at `depth`, on the line through those at `DEPTHS`; `optimizer` overrides its part."""
    first, second = DEPTHS
    steps = (depth - first) / (second - first)
    values = {
        part: round(getattr(short, part) + steps * (getattr(long, part) - getattr(short, part))) for part in PARTS
    }
    return MemoryParts(**values | ({} if optimizer is None else {"optimizer": optimizer}))


def full_model_name(module: str, run: BlockRun, depth: int) -> str:
    """Return the full model's name of a module in a version of `depth` blocks, which keeps the last blocks last."""
    for number in range(ENDS, depth):
        name = run.names[number]
        if module == name or module.startswith(f"{name}."):
            return run.names[run.depth - depth + number] + module[len(name) :]
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
