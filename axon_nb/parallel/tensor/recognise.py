"""The automatic plan: styles for modules that are known to compute the same when sharded."""

from __future__ import annotations

from torch import nn

from axon_nb.comm.errors import TensorError
from axon_nb.parallel.models import GPT, Attention, Block, Embedding, Head
from axon_nb.parallel.tensor.styles import check_divisible

__all__ = ["automatic_plan"]

_ELEMENTWISE = (
    nn.GELU,
    nn.ReLU,
    nn.SiLU,
    nn.Tanh,
    nn.Sigmoid,
    nn.ELU,
    nn.Mish,
    nn.LeakyReLU,
    nn.Hardswish,
    nn.Identity,
)
"""Modules allowed between a column and a row layer: each rank applies them to its own features."""


def automatic_plan(
    model: nn.Module, *, num_ranks: int, sequence: bool, parallel_loss: bool
) -> tuple[dict[str, str], dict[str, str]]:
    """Return styles by module, and reasons by known module that cannot be sharded.

    Known are the modules of `axon_nb.parallel.models.GPT`, and two linear layers with an elementwise activation between
    them inside an `nn.Sequential`.

    Raises:
        TensorError: `sequence` is set for another model than that GPT, or its sizes are not divisible.
    """
    if sequence and not isinstance(model, GPT):
        raise TensorError(
            "sequence=True with plan='auto' supports only the GPT of axon_nb.parallel.models; got a "
            f"{type(model).__name__}. Pass a plan with 'sequence', 'gather' and 'split'."
        )
    plan: dict[str, str] = {}
    skipped: dict[str, str] = {}
    for path, module in model.named_modules():
        prefix = f"{path}." if path else ""
        for unit in _units(module, parallel_loss=parallel_loss):
            unit_plan = {f"{prefix}{name}" if name else path: style for name, style in unit.items()}
            try:
                for name, style in unit_plan.items():
                    inner = model.get_submodule(name)
                    parent = model.get_submodule(name.rpartition(".")[0])
                    check_divisible(name, inner, style, parent=parent, num_ranks=num_ranks)
            except TensorError as error:
                if sequence:
                    raise
                # All of the unit or nothing: a column layer alone would pass only a part to its unsharded row layer.
                skipped |= dict.fromkeys(unit_plan, str(error))
                continue
            plan |= unit_plan
        if sequence:
            plan |= {f"{prefix}{name}" if name else path: style for name, style in _sequence_styles(module).items()}
    return plan, skipped


def _units(module: nn.Module, *, parallel_loss: bool) -> list[dict[str, str]]:
    if isinstance(module, Attention):
        return [{"": "share", "query": "column", "key": "column", "value": "column", "out": "row"}]
    if isinstance(module, Block):
        return [{"up": "column", "down": "row"}]
    if isinstance(module, Head):
        return [{"logits": "column" if parallel_loss else "column+gather"}]
    return _pairs(module) if isinstance(module, nn.Sequential) else []


def _pairs(module: nn.Sequential) -> list[dict[str, str]]:
    pairs, first = [], ""
    for name, child in module.named_children():
        if isinstance(child, nn.Linear):
            if first:
                pairs.append({first: "column", name: "row"})
                first = ""
            else:
                first = name
        elif not isinstance(child, _ELEMENTWISE):
            first = ""
    return pairs


def _sequence_styles(module: nn.Module) -> dict[str, str]:
    if isinstance(module, Embedding):
        return {"": "split"}
    if isinstance(module, Attention):
        return {"": "gather"}
    if isinstance(module, Block):
        return {"norm1": "sequence", "norm2": "sequence"}
    return {"norm": "sequence"} if isinstance(module, Head) else {}
