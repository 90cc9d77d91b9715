"""How what goes into a module and comes out of it lies over ranks, and how to join its parts and split them again.

The weights say it: a linear layer whose weight is a DTensor, sharded by rows, gives each rank a part of its output
features, one sharded by columns takes a part of the input features. So plans of transformers, torch's
`parallelize_module` and `parallelize` read alike. axon_nb's layers say it themselves. A module between such layers,
such as an activation or a norm of heads, has a part where one of its dimensions has the size of a part.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from msgspec import Struct
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Replicate, Shard

from axon_nb.comm.collectives.movement import all_gather
from axon_nb.comm.group import ProcessGroup
from axon_nb.comm.samples import differ, sample
from axon_nb.errors import UsageError
from axon_nb.parallel.tensor import layers

HEAD_SIZES = ("head_size", "head_dim", "attention_head_size")
HEAD_COUNTS = ("num_heads", "num_attention_heads", "n_heads", "n_head", "heads")
_MATRIX = 2
_SEQUENCE = 1
"""Dimension of the positions in (batch, positions, features)."""


class Layout(Struct, frozen=True):
    """A tensor over the ranks of a mesh, seen from one of them."""

    shape: tuple[int, ...]
    """Of the whole tensor."""
    mesh: DeviceMesh | None = None
    """None: the tensor is whole on this rank."""
    placements: tuple[Any, ...] = ()
    """torch's placements, one for each axis of the mesh."""

    @property
    def is_split(self) -> bool:
        """Whether a rank has only a part of it, or a term of a sum."""
        return any(not placement.is_replicate() for placement in self.placements)

    def join(self, part: torch.Tensor) -> torch.Tensor:
        """Return the whole tensor on each rank; gradients reach the parts. Collective if it is split."""
        if isinstance(part, DTensor):
            return part.full_tensor()
        if not self.is_split:
            return part
        return self._placed(part.contiguous(), self.placements).full_tensor()

    def split(self, whole: torch.Tensor, *, like: torch.Tensor) -> torch.Tensor:
        """Return this rank's part of a whole tensor, in the form of `like`. Its gradient is that of the whole."""
        if self.mesh is None:
            return whole
        placements = tuple(Replicate() if kind.is_partial() else kind for kind in self.placements)
        spread = self._placed(whole.contiguous(), (Replicate(),) * self.mesh.ndim).redistribute(placements=placements)
        return spread if isinstance(like, DTensor) else spread.to_local()

    def _placed(self, local: torch.Tensor, placements: Sequence[Any]) -> DTensor:
        stride = torch.empty(self.shape, device="meta").stride()
        return DTensor.from_local(
            local, self.mesh, placements, run_check=False, shape=torch.Size(self.shape), stride=stride
        )


class _Part(Struct, frozen=True):
    """Features of a layer, of which each rank has a part."""

    whole: int
    mesh: DeviceMesh
    placements: tuple[Any, ...]
    """With dimension 0 as that of the features."""
    factor: int = 1
    """How many projections the features hold, each split for itself, as those of gate and up."""

    @property
    def sizes(self) -> list[int]:
        """Features on each rank of the mesh's axis."""
        ranks = self.mesh.size()
        part = -(-self.whole // self.factor // ranks)
        return [max(0, min(part, self.whole // self.factor - part * rank)) * self.factor for rank in range(ranks)]

    @property
    def local(self) -> int:
        """Features on this rank."""
        return self.sizes[self.mesh.get_local_rank()]

    def on(self, dim: int, shape: Sequence[int], *, whole: int | None = None, plain: bool = False) -> Layout:
        """Lay a tensor out whose dimension `dim` is these features, or another number that is split likewise."""
        size = list(shape)
        size[dim] = self.whole if whole is None else whole
        dim %= len(size)
        is_plain = plain or self.factor == 1
        placements = tuple(
            Shard(dim) if is_plain else type(kind)(dim, split_factor=self.factor) for kind in self.placements
        )
        return Layout(tuple(size), self.mesh, placements)


class Known(Struct):
    """What earlier values of a module and slot have shown."""

    is_split: bool | None = None
    """Whether ranks have different values where sizes alone do not tell parts from whole ones."""
    dim: int | None = None
    """The dimension of the heads."""
    experts: tuple[_Part, ...] = ()
    """Features of the parent's own weights, which transformers makes plain tensors while its experts run."""

    positions: DeviceMesh | None = None
    """The ranks over which the model's norms are replicated: each may have its positions between blocks."""
    mesh: DeviceMesh | None = None
    """The ranks over which the model has a DTensor; quantized weights beside it are plain parts."""

    @classmethod
    def before(cls, model: nn.Module, parent: nn.Module | None) -> Known:
        """Return what is known of a module in `parent` before it is called."""
        own = () if parent is None else parent.parameters(recurse=False)
        parts = (_split(parameter, 1, of=3) for parameter in own)
        meshes = (each.device_mesh for each in model.parameters() if isinstance(each, DTensor))
        mesh = next((mesh for mesh in meshes if mesh.ndim == 1), None)
        experts = tuple(part for part in parts if part is not None)
        return cls(experts=experts, positions=_sequence_mesh(model), mesh=mesh)

    def checked(self, value: torch.Tensor, layout: Layout) -> Layout:
        """Return the layout, or that of a whole value if all ranks have the same. Collective in the first call."""
        if self.is_split is None:
            assert layout.mesh is not None
            own = sample(value).unsqueeze(0)
            group = ProcessGroup.wrap(layout.mesh.get_group())
            self.is_split = differ(all_gather(own, dim=0, group=group), tolerance=1e-6)
        return layout if self.is_split else Layout(tuple(value.shape))


def layout_of(module: nn.Module, parent: nn.Module | None, slot: str, value: torch.Tensor, known: Known) -> Layout:
    """Return how a value at a module's boundary lies over ranks. Ask while the module runs: FSDP then has its weights.

    Args:
        module: The module.
        parent: The module that holds it.
        slot: ``input``, ``output``, or ``attention`` for the maps of (batch, heads, positions, positions).
        value: This rank's value.
        known: What earlier calls for this module and slot have noted, and this one adds to.

    Raises:
        UsageError: more than one dimension may be the split one.
    """
    if isinstance(value, DTensor):
        return Layout(tuple(value.shape), value.device_mesh, tuple(value.placements))
    whole = Layout(tuple(value.shape))
    if (own := _of_own_layer(module, slot, value)) is not None:
        return own
    parts = list(_columns(module, known))
    if slot == "attention":
        heads = next((found for part in parts if (found := _heads(module, part)) is not None), None)
        if heads is None:
            return whole
        return known.checked(value, parts[0].on(1, value.shape, whole=heads[1], plain=True))
    if isinstance(module, nn.Embedding):
        return whole
    if slot == "input" and (rows := _rows(module, known)) is not None and value.shape[-1] == rows.local:
        return rows.on(-1, value.shape)
    if (own_part := _own_columns(module, known)) is not None:
        return own_part.on(-1, value.shape) if slot == "output" and value.shape[-1] == own_part.local else whole
    if _rows(module, known) is not None:
        return whole
    between = None if parts or _holds_parts(module) else _between(module, parent, value, known)
    return between or _by_position(value, known)


def _of_own_layer(module: nn.Module, slot: str, value: torch.Tensor) -> Layout | None:
    """Lay out a value of axon_nb's tensor-parallel layers."""
    features, positions = value.ndim - 1, value.ndim - 2
    if isinstance(module, layers.ColumnParallelLinear):
        dim = positions if module.sequence else None
        if slot == "output":
            dim = None if module.gather_output else features
    elif isinstance(module, layers.RowParallelLinear):
        dim = features if module.input_is_parallel else None
        if slot == "output":
            dim = positions if module.sequence else None
    elif isinstance(module, layers.SequenceParallelNorm):
        dim = positions
    elif isinstance(module, layers.TensorParallelAttention):
        dim = positions if module.sequence else None
    elif isinstance(module, layers.TensorParallelBlock):
        dim = positions if module.attention.sequence else None
    elif isinstance(module, layers.ParallelMLP):
        dim = positions if module.up.sequence else None
    else:
        return None
    inner = {layers.TensorParallelBlock: "attention", layers.ParallelMLP: "up"}.get(type(module))
    owner: Any = getattr(module, inner) if inner else module
    group: ProcessGroup = owner.group
    if dim is None or group.size() == 1:
        return Layout(tuple(value.shape))
    shape = list(value.shape)
    shape[dim] *= group.size()
    return Layout(tuple(shape), _mesh(group, value.device.type), (Shard(dim),))


@functools.lru_cache(maxsize=64)
def _mesh(group: ProcessGroup, device: str) -> DeviceMesh:
    return DeviceMesh.from_group(group.torch_group, device)


def _split(weight: Any, dim: int, *, of: int) -> _Part | None:
    """Return how a weight with `of` dimensions is split along one of them; None if it is not, or has others."""
    if not isinstance(weight, DTensor) or weight.ndim != of or weight.device_mesh.ndim > 1:
        return None
    (kind,) = weight.placements
    if getattr(kind, "dim", None) not in (dim, dim - of):
        return None
    return _Part(weight.shape[dim], weight.device_mesh, (kind,), int(getattr(kind, "split_factor", 1)))


def _own_columns(module: nn.Module, known: Known) -> _Part | None:
    return _split(getattr(module, "weight", None), 0, of=2) or _plain_part(module, 0, known)


def _rows(module: nn.Module, known: Known) -> _Part | None:
    return _split(getattr(module, "weight", None), 1, of=2) or _plain_part(module, 1, known)


def _plain_part(module: nn.Module, dim: int, known: Known) -> _Part | None:
    """Return how a linear layer is split whose weight is a part without saying so, as transformers' quantized ones."""
    if not isinstance(module, nn.Linear) or isinstance(module.weight, DTensor) or module.weight.ndim != _MATRIX:
        return None
    whole = (module.out_features, module.in_features)[dim]
    if known.mesh is None or module.weight.shape[dim] * known.mesh.size() != whole:
        return None
    return _Part(whole, known.mesh, (Shard(0),))


def _columns(module: nn.Module, known: Known) -> Iterator[_Part]:
    """Yield what the layers directly in a module give in parts, the first of them first."""
    for child in module.children():
        # A part that FSDP manages for itself may be sharded once more just now.
        if isinstance(child, layers.ColumnParallelLinear) and not child.gather_output and child.group.size() > 1:
            mesh = _mesh(child.group, child.weight.device.type)
            yield _Part(child.out_features, mesh, (Shard(0),))
        elif not isinstance(child, FSDPModule | nn.Embedding) and (part := _own_columns(child, known)) is not None:
            yield part


def _holds_parts(module: nn.Module) -> bool:
    return any(isinstance(parameter, DTensor) for parameter in module.parameters()) or any(
        isinstance(child, layers.ColumnParallelLinear | layers.RowParallelLinear) for child in module.modules()
    )


def head_size(module: nn.Module, features: int) -> int | None:
    """Return the size of a head, given the features of all heads together; None if the module does not tell."""
    if isinstance(module, layers.TensorParallelAttention):
        return features // (module.heads * module.group.size())
    for name in HEAD_SIZES:
        if isinstance(size := getattr(module, name, None), int) and size > 0:
            return size
    for name in HEAD_COUNTS:
        if isinstance(count := getattr(module, name, None), int) and count > 0:
            return features // count
    return None


def _heads(module: nn.Module, part: _Part) -> tuple[int, int, int] | None:
    """Return the heads on this rank and in all, and their size."""
    size = head_size(module, part.whole)
    return None if not size or part.local % size else (part.local // size, part.whole // size, size)


def _between(module: nn.Module, parent: nn.Module | None, value: torch.Tensor, known: Known) -> Layout | None:
    """Lay out a value of a module that has no parts of its own, by its neighbours in the same parent."""
    if parent is None or value.ndim < 2:
        return None
    parts = [*_columns(parent, known), *known.experts]
    choices: dict[int, Layout] = {}
    for part, (local, whole, size) in ((part, heads) for part in parts if (heads := _heads(parent, part))):
        for dim in range(1, value.ndim - 1) if value.ndim > 3 else ():
            if value.shape[-1] == size and value.shape[dim] == local:
                choices.setdefault(dim, part.on(dim, value.shape, whole=whole, plain=True))
    # Heads lie beside each other in the projection's output, of which the value is usually a view.
    beside = [dim for dim in choices if value.stride(dim) == value.shape[-1]]
    for dims in (list(choices), beside, [known.dim]):
        if len(dims) == 1 and dims[0] in choices:
            known.dim = dims[0]
            return known.checked(value, choices[dims[0]])
    if choices:
        raise UsageError(
            f"a {type(module).__name__} has {value.shape[1]} heads and as many positions on this rank, so nothing "
            "tells them apart; use a text of another length."
        )
    for part in parts:
        if value.shape[-1] == part.local:
            return known.checked(value, part.on(-1, value.shape))
        if part.factor > 1 and value.shape[-1] * part.factor == part.local:
            return known.checked(value, part.on(-1, value.shape, whole=part.whole // part.factor, plain=True))
    return None


def _by_position(value: torch.Tensor, known: Known) -> Layout:
    """Lay out a value between blocks."""
    if known.positions is None or value.ndim < 3:
        return Layout(tuple(value.shape))
    shape = list(value.shape)
    shape[_SEQUENCE] *= known.positions.size()
    return known.checked(value, Layout(tuple(shape), known.positions, (Shard(_SEQUENCE),)))


def _sequence_mesh(module: nn.Module) -> DeviceMesh | None:
    """Return the mesh of a norm with a replicated parameter, which torch's style for norms of positions makes."""
    for inner in module.modules():
        if isinstance(inner, nn.Linear | nn.Embedding):
            continue  # its bias may be replicated
        for parameter in inner.parameters(recurse=False):
            if not isinstance(parameter, DTensor) or not parameter.ndim == parameter.device_mesh.ndim == 1:
                continue
            if parameter.placements[0].is_replicate():
                return parameter.device_mesh
    return None
