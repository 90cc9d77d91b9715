"""Models of many equal blocks: finding them, leaving most of them out, and drawing the line from two depths on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn

from axon_nb.plan.memory_record import PARTS, MemoryParts
from axon_nb.plan.simulate_replay import Key, Moment

__all__ = ["DEPTHS", "ENDS", "Run", "extrapolate_peak", "find_block_run", "line", "moment_key", "shorten"]

DEPTHS = (4, 5)
"""Numbers of blocks of the two versions that run: FSDP holds up to three units at once, at either end."""
ENDS = 2
"""Blocks at either end whose moments are told apart."""
_ROWS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)


@dataclass(frozen=True, slots=True)
class Run:
    """Consecutive blocks of a model that are equal but for their weights."""

    names: tuple[str, ...]
    """Their names in the model."""

    @property
    def depth(self) -> int:
        """How many there are."""
        return len(self.names)


def find_block_run(model: nn.Module, *, least: int) -> Run | None:
    """The row of equal blocks that has most parameters; None: there is none of at least so many."""
    best: tuple[int, Run] | None = None
    for path, container in model.named_modules():
        if not isinstance(container, _ROWS):
            continue
        for names in _equal_rows(container):
            blocks = [container.get_submodule(name) for name in names]
            elements = sum(parameter.numel() for block in blocks for parameter in block.parameters())
            if len(names) >= least and elements and (best is None or elements > best[0]) and _apart(blocks):
                best = elements, Run(tuple(f"{path}.{name}" if path else name for name in names))
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


def _apart(blocks: list[nn.Module]) -> bool:
    """Whether no two share a parameter."""
    ids = [{id(parameter) for parameter in block.parameters()} for block in blocks]
    return sum(map(len, ids)) == len(set().union(*ids))


def shorten(model: nn.Module, run: Run, depth: int) -> None:
    """Leave only the first `depth` blocks of a run."""
    path = run.names[0].rpartition(".")[0]
    container = model.get_submodule(path)
    for name in reversed(run.names[depth:]):
        del container._modules[name.rpartition(".")[2]]


def moment_key(run: Run | None, depth: int) -> Any:
    """Names moments of a step so that those of different depths can be told to be the same.

    Args:
        run: The blocks; None: all moments of a phase have one name.
        depth: How many of them are there.

    Returns:
        A function from phase and module, in the order of time, to a `Key`; it remembers where it is.
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
    short: dict[Key, Moment], long: dict[Key, Moment], run: Run, *, optimizer: int | None = None
) -> Moment | None:
    """The highest moment of the whole model, from those of two versions of it.

    What is held at a moment that has the same name in both is linear in the number of blocks; so is what is held at the
    blocks between, from the first ones to the last ones, and the highest of them is at an end.

    Args:
        short: Of the version with fewer blocks.
        long: Of the other.
        run: The blocks of the whole.
        optimizer: Bytes of the optimizer's states, where they are known; None: they are on the line as well.

    Returns:
        None where the two versions have not the same moments.
    """
    if short.keys() - long.keys():
        return None
    moments = [
        Moment(
            line(short[key].parts, long[key].parts, run.depth, optimizer=optimizer),
            long[key].phase,
            renamed(long[key].module, run, DEPTHS[1]),
            long[key].activations,
        )
        for key in short
    ]
    return max(moments, key=lambda moment: moment.parts.total)


def line(short: MemoryParts, long: MemoryParts, depth: int, *, optimizer: int | None = None) -> MemoryParts:
    """The parts at `depth`, on the line through those at `DEPTHS`; the optimizer's as given, where they are."""
    first, second = DEPTHS
    steps = (depth - first) / (second - first)
    values = {
        part: round(getattr(short, part) + steps * (getattr(long, part) - getattr(short, part))) for part in PARTS
    }
    return MemoryParts(**values | ({} if optimizer is None else {"optimizer": optimizer}))


def renamed(module: str, run: Run, depth: int) -> str:
    """A module of a version of `depth` blocks by its name in the whole model: the last blocks are the last ones."""
    for number in range(ENDS, depth):
        name = run.names[number]
        if module == name or module.startswith(f"{name}."):
            return run.names[run.depth - depth + number] + module[len(name) :]
    return module
