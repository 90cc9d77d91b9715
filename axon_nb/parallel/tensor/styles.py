"""The ways to cut a module of an ordinary model, by name: torch's parallel styles."""

from __future__ import annotations

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
from axon_nb.parallel.tensor.functions import split_sequence

__all__ = ["STYLES", "check_fits", "style_of"]

STYLES = {
    "column": "output features are cut; the output is this rank's part",
    "column+gather": "output features are cut; the output is gathered",
    "row": "input features are cut, as a column layer before gives them; outputs are summed",
    "split+row": "input features are cut, of an input that all ranks have; outputs are summed",
    "sequence": "a norm on this rank's positions",
    "share": "several column layers inside take the same input: one sum for them backward",
    "gather": "as share, and the positions of the input are gathered",
    "split": "of the positions of the output each rank keeps its own",
}
"""Names of styles, and what each does."""

_CUT = {"column": 0, "column+gather": 0, "row": 1, "split+row": 1}
_HEAD_SIZES = ("head_size", "head_dim", "attention_head_size")
_HEAD_COUNTS = ("num_heads", "num_attention_heads", "n_heads", "n_head", "heads")
_POSITIONS = Shard(1)
"""The layout of activations of which each rank has its own positions: (batch, positions, features)."""


class _SplitOutput(ParallelStyle):
    """Each rank keeps its own positions of the output."""

    def __init__(self) -> None:
        super().__init__()

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        group = ProcessGroup.wrap(device_mesh.get_group())
        module.register_forward_hook(lambda _, __, output: split_sequence(output, group))
        return module


def style_of(name: str, module: nn.Module, *, sequence: bool, inside: bool) -> ParallelStyle:
    """Torch's style for a name.

    Args:
        name: One of `STYLES`.
        module: What it is for.
        sequence: Activations between blocks are cut along the sequence.
        inside: It is within a module of the style `share` or `gather`, and gets its input as that leaves it.
    """
    whole, between = Replicate(), _POSITIONS if sequence else Replicate()
    # Said to be cut, an input that is whole would be made whole anew: a sum backward for each layer that takes it.
    given = whole if inside or isinstance(module, nn.Embedding) else between
    embedding = isinstance(module, nn.Embedding)
    made: dict[str, Any] = {
        "column": lambda: ColwiseParallel(input_layouts=given),
        "column+gather": lambda: ColwiseParallel(input_layouts=given, output_layouts=whole),
        "row": lambda: RowwiseParallel(input_layouts=whole if embedding else Shard(-1), output_layouts=between),
        "split+row": lambda: RowwiseParallel(input_layouts=whole, output_layouts=between),
        "sequence": lambda: SequenceParallel(use_local_output=True),
        "gather": lambda: PrepareModuleInput(
            input_layouts=(_POSITIONS,), desired_input_layouts=(whole,), use_local_output=False
        ),
        "share": lambda: PrepareModuleInput(
            input_layouts=(whole,), desired_input_layouts=(whole,), use_local_output=False
        ),
        "split": _SplitOutput,
    }
    style: ParallelStyle = made[name]()
    return style


def check_fits(path: str, module: nn.Module, style: str, *, parent: nn.Module | None, ranks: int) -> None:
    """Whether a style can cut a module over so many ranks.

    Raises:
        TensorError: it is of another kind, its features or its parent's heads do not divide.
    """
    if style not in _CUT:
        return
    if not isinstance(module, nn.Linear | nn.Embedding):
        raise TensorError(f"{path} is a {type(module).__name__}: {style!r} cuts nn.Linear and nn.Embedding.")
    if isinstance(module, nn.Linear):
        what = "in_features" if _CUT[style] else "out_features"
    else:
        what = "num_embeddings" if _CUT[style] else "embedding_dim"
    size = int(getattr(module, what))
    if size % ranks:
        raise TensorError(
            f"{path}.{what}={size} over {ranks} ranks: it must be a multiple of {ranks}; the next is "
            f"{-(-size // ranks) * ranks}."
        )
    heads = _heads(parent, size) if isinstance(module, nn.Linear) and style == "column" else None
    if heads and heads % ranks:
        raise TensorError(
            f"{path} has {heads} heads, and there are {ranks} ranks: each rank has as many, so heads are a multiple of "
            f"{ranks}."
        )


def _heads(parent: nn.Module | None, features: int) -> int | None:
    for name in _HEAD_SIZES:
        if isinstance(size := getattr(parent, name, None), int) and size > 0:
            return features // size
    for name in _HEAD_COUNTS:
        if isinstance(count := getattr(parent, name, None), int) and count > 0:
            return count
    return None
