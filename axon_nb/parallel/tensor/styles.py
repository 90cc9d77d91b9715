"""Parallel styles for the modules of an ordinary model, by name; `auto` chooses those known to compute the same."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
)

from axon_nb.comm.errors import TensorError
from axon_nb.comm.group import ProcessGroup
from axon_nb.parallel.models import GPT, Attention, Block, Embedding, Head
from axon_nb.parallel.tensor.functions import split_sequence
from axon_nb.parallel.tensor.named_plans import named_units

STYLES = {
    "column": "shard the output features; the output is this rank's part",
    "column+gather": "shard the output features; gather the output",
    "row": "shard the input features, as a column layer before provides them; sum the outputs",
    "split+row": "shard the input features of a replicated input; sum the outputs",
    "sequence": "apply a norm to this rank's positions",
    "heads": "apply a norm to this rank's heads: (batch, positions, heads, head size)",
    "share": "compute one backward sum for several column layers inside that use the same input",
    "gather": "like share, and also gather the positions of the input",
    "split": "keep this rank's positions of the output",
}
"""Names of the styles, and what each does."""

_SHARD_DIM = {"column": 0, "column+gather": 0, "row": 1, "split+row": 1}
_HEAD_SIZES = ("head_size", "head_dim", "attention_head_size")
_HEAD_COUNTS = ("num_heads", "num_attention_heads", "n_heads", "n_head", "heads")
_POSITIONS = Shard(1)
"""Layout of activations sharded by position: (batch, positions, features)."""
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


class _SplitOutput(ParallelStyle):
    """Keeps this rank's positions of the output."""

    def __init__(self) -> None:
        super().__init__()

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        group = ProcessGroup.wrap(device_mesh.get_group())
        module.register_forward_hook(lambda _, __, output: split_sequence(output, group))
        return module


def create_style(name: str, module: nn.Module, *, sequence: bool, inside: bool) -> ParallelStyle:
    """Create torch's style for a name.

    Args:
        name: One of `STYLES`.
        module: The module it is for.
        sequence: Whether activations between blocks are sharded along the sequence.
        inside: Whether a parent module has the style `share` or `gather`, which prepares the input.
    """
    replicated, between = Replicate(), _POSITIONS if sequence else Replicate()
    # A replicated input must not be declared as sharded: each layer that uses it would then add a sum in backward.
    input_layout = replicated if inside or isinstance(module, nn.Embedding) else between
    embedding = isinstance(module, nn.Embedding)
    factories: dict[str, Any] = {
        "column": lambda: ColwiseParallel(input_layouts=input_layout),
        "column+gather": lambda: ColwiseParallel(input_layouts=input_layout, output_layouts=replicated),
        "row": lambda: RowwiseParallel(input_layouts=replicated if embedding else Shard(-1), output_layouts=between),
        "split+row": lambda: RowwiseParallel(input_layouts=replicated, output_layouts=between),
        "sequence": lambda: SequenceParallel(use_local_output=True),
        "heads": lambda: SequenceParallel(sequence_dim=2, use_local_output=True),
        "gather": lambda: PrepareModuleInput(
            input_layouts=(_POSITIONS,), desired_input_layouts=(replicated,), use_local_output=False
        ),
        "share": lambda: PrepareModuleInput(
            input_layouts=(replicated,), desired_input_layouts=(replicated,), use_local_output=False
        ),
        "split": _SplitOutput,
    }
    style: ParallelStyle = factories[name]()
    return style


def check_divisible(path: str, module: nn.Module, style: str, *, parent: nn.Module | None, num_ranks: int) -> None:
    """Check that a style can shard a module over `num_ranks` ranks.

    Raises:
        TensorError: the module has another type, or its features or its parent's heads are not divisible.
    """
    if style not in _SHARD_DIM:
        return
    if not isinstance(module, nn.Linear | nn.Embedding):
        raise TensorError(f"{path}: style {style!r} supports nn.Linear and nn.Embedding; got {type(module).__name__}.")
    if isinstance(module, nn.Linear):
        what = "in_features" if _SHARD_DIM[style] else "out_features"
    else:
        what = "num_embeddings" if _SHARD_DIM[style] else "embedding_dim"
    size = int(getattr(module, what))
    if size % num_ranks:
        raise TensorError(
            f"{path}.{what} must be divisible by the group size ({num_ranks}); got {size}. The next multiple is "
            f"{-(-size // num_ranks) * num_ranks}."
        )
    heads = _heads(parent, size) if isinstance(module, nn.Linear) and style == "column" else None
    if heads and heads % num_ranks:
        raise TensorError(
            f"{path}: the number of heads must be divisible by the group size ({num_ranks}); got {heads}."
        )


def _heads(parent: nn.Module | None, features: int) -> int | None:
    for name in _HEAD_SIZES:
        if isinstance(size := getattr(parent, name, None), int) and size > 0:
            return features // size
    for name in _HEAD_COUNTS:
        if isinstance(count := getattr(parent, name, None), int) and count > 0:
            return count
    return None


def automatic_plan(
    model: nn.Module, *, num_ranks: int, sequence: bool, parallel_loss: bool
) -> tuple[dict[str, str], dict[str, str]]:
    """Return styles by module, and reasons by known module that cannot be sharded.

    Known are the modules of `axon_nb.parallel.models.GPT`, those in the `tp_plan` of a Hugging Face model, and two
    linear layers with an elementwise activation between them inside an `nn.Sequential`.

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
    positions: dict[str, str] = {}
    units = list(named_units(model))
    for path, module in model.named_modules():
        units += [_full_names(path, unit) for unit in _units(module, parallel_loss=parallel_loss)]
        if sequence:
            positions |= _full_names(path, _sequence_styles(module))
    for unit in units:
        try:
            for name, style in unit.items():
                inner = model.get_submodule(name)
                parent = model.get_submodule(name.rpartition(".")[0])
                check_divisible(name, inner, style, parent=parent, num_ranks=num_ranks)
        except TensorError as error:
            if sequence:
                raise
            # All of the unit or nothing: a column layer alone would pass only a part to its unsharded row layer.
            skipped |= dict.fromkeys(unit, str(error))
            continue
        plan |= unit
    return plan | positions, skipped


def _full_names(path: str, styles: Mapping[str, str]) -> dict[str, str]:
    """Return styles with the names of modules in the model."""
    return {".".join(filter(None, (path, name))): style for name, style in styles.items()}


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
