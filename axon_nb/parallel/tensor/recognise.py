"""A plan for models whose parts are known to compute the same when they are cut."""

from __future__ import annotations

from torch import nn

from axon_nb.comm.errors import TensorError
from axon_nb.parallel.models import GPT, Attention, Block, Embedding, Head
from axon_nb.parallel.tensor.styles import check_fits

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
"""What may be between a column and a row layer: each rank applies it to its own features."""


def automatic_plan(
    model: nn.Module, *, ranks: int, sequence: bool, parallel_loss: bool
) -> tuple[dict[str, str], dict[str, str]]:
    """Styles by module, and reasons by module that stays whole though it is known.

    Known are the parts of `axon_nb.parallel.models.GPT`, and within an `nn.Sequential` two linear layers with an
    elementwise activation between.

    Raises:
        TensorError: `sequence` for another model than that GPT, or one that does not divide.
    """
    if sequence and not isinstance(model, GPT):
        raise TensorError(
            f"sequence=True for a {type(model).__name__}: where its activations can be cut is known of the GPT of "
            "axon_nb.parallel.models alone; give a plan with 'sequence', 'gather' and 'split'."
        )
    plan: dict[str, str] = {}
    whole: dict[str, str] = {}
    for path, module in model.named_modules():
        prefix = f"{path}." if path else ""
        for unit in _units(module, parallel_loss=parallel_loss):
            named = {f"{prefix}{name}" if name else path: style for name, style in unit.items()}
            try:
                for name, style in named.items():
                    inner = model.get_submodule(name)
                    parent = model.get_submodule(name.rpartition(".")[0])
                    check_fits(name, inner, style, parent=parent, ranks=ranks)
            except TensorError as error:
                if sequence:
                    raise
                # A column layer alone would give its row layer a part of what it needs: all of the unit or nothing.
                whole |= dict.fromkeys(named, str(error))
                continue
            plan |= named
        if sequence:
            plan |= {f"{prefix}{name}" if name else path: style for name, style in _positions(module).items()}
    return plan, whole


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


def _positions(module: nn.Module) -> dict[str, str]:
    if isinstance(module, Embedding):
        return {"": "split"}
    if isinstance(module, Attention):
        return {"": "gather"}
    if isinstance(module, Block):
        return {"norm1": "sequence", "norm2": "sequence"}
    return {"norm": "sequence"} if isinstance(module, Head) else {}
