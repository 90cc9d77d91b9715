"""A model's blocks: those that its class names, as Hugging Face's do, or modules that a container repeats."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from torch import nn

_ROWS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)
_NAMES = "_no_split_modules"
"""Attribute in which models of transformers list the classes of their blocks."""


def named_blocks(model: nn.Module) -> list[nn.Module]:
    """Return the outermost modules of the classes that the model, or a model inside it, names as its blocks."""
    names = {name for module in model.modules() for name in getattr(module, _NAMES, None) or ()}
    return _outermost(model, names) if names else []


def _outermost(module: nn.Module, names: set[str]) -> list[nn.Module]:
    blocks: list[nn.Module] = []
    for child in module.children():
        is_block = type(child).__name__ in names and any(True for _ in child.parameters())
        blocks += [child] if is_block else _outermost(child, names)
    return blocks


def repeated_blocks(module: nn.Module) -> list[nn.Module]:
    """Return the outermost modules with parts and parameters whose container holds several of their class."""
    kinds = Counter(type(child) for child in module.children() if _is_block(child)) if _is_row(module) else Counter()
    blocks: list[nn.Module] = []
    for child in module.children():
        blocks += [child] if _is_block(child) and kinds[type(child)] > 1 else repeated_blocks(child)
    return blocks


def _is_row(module: nn.Module) -> bool:
    return isinstance(module, _ROWS)


def _is_block(module: nn.Module) -> bool:
    return not _is_row(module) and any(True for _ in module.children()) and any(True for _ in module.parameters())


def rows_of_blocks(model: nn.Module) -> Iterator[dict[str, nn.Module]]:
    """Yield consecutive modules of one class in one container, by name."""
    for path, container in model.named_modules():
        if not _is_row(container):
            continue
        row: dict[str, nn.Module] = {}
        for name, child in container.named_children():
            if row and type(child) is not type(next(iter(row.values()))):
                yield row
                row = {}
            row[f"{path}.{name}" if path else name] = child
        yield row


def num_parameters(blocks: list[nn.Module]) -> int:
    """Return the number of parameter elements in these modules."""
    return sum(parameter.numel() for block in blocks for parameter in block.parameters())


def equal_row(model: nn.Module) -> list[nn.Module] | None:
    """Return the modules of one class, at least two in a row, that have the most parameters; None: there are none."""
    rows = [list(row.values()) for row in rows_of_blocks(model) if len(row) > 1]
    best = max(rows, key=num_parameters, default=None)
    return best if best and num_parameters(best) else None
