"""The tensor-parallel plans that models of transformers bring along, in our styles."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from typing import Any

from torch import nn

_STYLES = {
    "colwise": "column",
    "rowwise": "row",
    "colwise_gather_output": "column+gather",
    "colwise_rep": "column+gather",
    "rowwise_split_input": "split+row",
    "local_colwise": "column",
    "local_rowwise": "row",
}
"""Ours by transformers' names. Others, such as those of experts, are left out: these modules stay whole."""
_CHANGED_IN_PLACE = ".shared_expert"
"""Llama 4 adds to the output of these modules in place, which autograd refuses for the output of a DTensor layer."""


def named_units(model: nn.Module) -> Iterator[dict[str, str]]:
    """Yield the styles of linear layers that are sharded together, by name: an attention, an MLP, the head.

    A norm of single heads inside an attention gets the style ``heads``. A unit with other parameters than those of the
    plan is left out, because nothing says what they are to do with a part of the features.
    """
    owners = Counter(id(parameter) for _, parameter in model.named_parameters(remove_duplicate=False))
    for path, inner in _planned(model):
        patterns = {re.compile(re.escape(name).replace(r"\*", r"\d+")): style for name, style in inner.tp_plan.items()}
        units: dict[str, dict[str, str]] = {}
        for name, module in inner.named_modules():
            style = next((style for pattern, style in patterns.items() if pattern.fullmatch(name)), "")
            # A head that shares its weight with the embedding stays whole.
            is_tied = any(owners[id(parameter)] > 1 for parameter in module.parameters(recurse=False))
            if isinstance(module, nn.Linear) and style in _STYLES and not is_tied:
                units.setdefault(name.rpartition(".")[0], {})[name] = _STYLES[style]
        for parent, unit in units.items():
            if parent.endswith(_CHANGED_IN_PLACE):
                continue
            norms = _norms(inner.get_submodule(parent), parent, unit) if "column" in unit.values() else {}
            if norms is not None:
                yield {path + name: style for name, style in (unit | norms).items()}


def _planned(module: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the outermost modules that have a plan."""
    if isinstance(getattr(module, "tp_plan", None), dict) and module.tp_plan:
        yield path, module
        return
    for name, child in module.named_children():
        yield from _planned(child, f"{path}{name}.")


def _norms(parent: nn.Module, path: str, unit: dict[str, str]) -> dict[str, str] | None:
    """Return the norms of single heads in a module; None: it has other parameters besides."""
    norms = {}
    size = getattr(parent, "head_dim", None)
    if any(True for _ in parent.parameters(recurse=False)):
        return None
    for name, child in parent.named_children():
        full = f"{path}.{name}"
        if full in unit:
            continue
        shapes = [tuple(parameter.shape) for parameter in child.parameters()]
        if shapes and shapes != [(size,)]:
            return None
        if shapes:
            norms[full] = "heads"
    return norms
