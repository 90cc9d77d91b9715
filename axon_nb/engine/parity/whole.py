"""A whole model on one rank: the parts of all ranks, loaded into a plain model, with the optimizers that train it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from axon_nb.engine.elastic import zero
from axon_nb.engine.parity.digests import local_part, part_of
from axon_nb.engine.parity.recorder import clean_name, named_parameters
from axon_nb.engine.sharding.sharded import is_sharded, is_stage
from axon_nb.errors import UsageError
from axon_nb.records.training.comparison import Bounds, Place


@dataclass
class Pieces:
    """What one rank holds of a model."""

    tensors: dict[str, tuple[torch.Tensor, Bounds | None]] = field(default_factory=dict)
    """Parameters and buffers by name, and which part of the whole each is, if it says so."""
    states: dict[str, dict[str, Any]] = field(default_factory=dict)
    """States of the optimizer by parameter."""


def is_whole(model: nn.Module) -> bool:
    """Whether each rank holds all of the model, as far as the model says so."""
    return not any(is_sharded(one) or is_stage(one) or getattr(one, "shard_dims", {}) for one in model.modules()) and (
        not any(is_sharded(parameter) for parameter in model.parameters())
    )


def gather_pieces(model: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> list[Pieces]:
    """Send what each rank holds to rank 0; collective over all ranks. Other ranks get an empty list."""
    pieces, names = Pieces(), {}
    for name, parameter in named_parameters(model):
        local, bounds = local_part(parameter)
        pieces.tensors[name] = local.detach().cpu().clone(), bounds
        names[id(parameter)] = name
    for name, tensor in model.named_buffers():
        pieces.tensors[clean_name(name.removeprefix("module."))] = tensor.detach().cpu().clone(), None
    for optimizer in optimizers:
        for trained, state in optimizer.state.items():
            if id(trained) in names:
                pieces.states[names[id(trained)]] = {
                    key: local_part(value)[0].detach().cpu().clone() if isinstance(value, torch.Tensor) else value
                    for key, value in state.items()
                }
    gathered: list[Any] | None = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
    dist.gather_object(pieces, gathered)
    return gathered or []


def gather_zero_states(optimizers: Sequence[torch.optim.Optimizer]) -> list[dict[tuple[int, str], Any]]:
    """Send the states of ZeRO-1 optimizers to rank 0; collective over all ranks. Other ranks get an empty list."""
    if not optimizers:
        return []
    mine = [
        {key: value.cpu() if isinstance(value, torch.Tensor) else value for key, value in zero.states(one).items()}
        for one in optimizers
    ]
    gathered: list[Any] | None = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
    dist.gather_object(mine, gathered)
    return [dict(item for held in of_ranks for item in held.items()) for of_ranks in zip(*gathered or (), strict=True)]


@torch.no_grad()
def fill(plain: nn.Module, pieces: Sequence[Pieces], places: Mapping[int, Place]) -> None:
    """Load the parts of all ranks into a plain model.

    Raises:
        UsageError: a part is missing, or has a shape that fits nowhere.
    """
    buffers = dict(plain.named_buffers())
    wholes: list[tuple[str, torch.Tensor]] = [*named_parameters(plain), *buffers.items()]
    for name, whole in wholes:
        parts = {rank: piece.tensors[name] for rank, piece in enumerate(pieces) if name in piece.tensors}
        if not parts and name in buffers:
            continue
        if not parts:
            raise UsageError(f"No rank's model has the parameter {name} of the plain model: both need the same names.")
        _join(whole, parts, places, name)


def _join(
    whole: torch.Tensor, parts: Mapping[int, tuple[torch.Tensor, Bounds | None]], places: Mapping[int, Place], name: str
) -> None:
    filled = 0
    seen = set()
    for rank, (part, known) in parts.items():
        bounds = known or part_of(tuple(part.shape), tuple(whole.shape), places[rank], of_batch=False, call=0)
        if bounds is None or len(bounds) != whole.ndim:
            raise UsageError(
                f"{name} has the shape {tuple(part.shape)} on rank {rank}, and {tuple(whole.shape)} in the plain model."
            )
        if bounds in seen:
            continue
        seen.add(bounds)
        whole[tuple(slice(*bound) for bound in bounds)].copy_(part)
        filled += part.numel()
    if filled < whole.numel():
        raise UsageError(f"The ranks hold {filled} of the {whole.numel()} elements of {name} in the plain model.")


def replace_optimizer(
    optimizer: torch.optim.Optimizer,
    model: nn.Module,
    plain: nn.Module,
    *,
    pieces: Sequence[Pieces],
    places: Mapping[int, Place],
) -> None:
    """Make an optimizer of this rank's part one of the plain model, with the states of all ranks."""
    names = {id(parameter): name for name, parameter in named_parameters(model)}
    wholes = dict(named_parameters(plain))
    left = dict(wholes)
    for group in optimizer.param_groups:
        kept = [names[id(parameter)] for parameter in group["params"] if id(parameter) in names]
        group["params"] = [wholes[name] for name in kept]
        for name in kept:
            left.pop(name, None)
    held = [name for name in left if any(name in piece.tensors for piece in pieces)]
    optimizer.param_groups[0]["params"] += [wholes[name] for name in held]  # those of other stages
    optimizer.state.clear()
    for name, parameter in wholes.items():
        states = {rank: piece.states[name] for rank, piece in enumerate(pieces) if name in piece.states}
        for key, first in next(iter(states.values()), {}).items():
            if not isinstance(first, torch.Tensor) or not first.ndim:
                optimizer.state[parameter][key] = first
                continue
            value = torch.zeros_like(parameter, dtype=first.dtype)
            parts = {rank: (state[key], pieces[rank].tensors[name][1]) for rank, state in states.items()}
            _join(value, parts, places, name)
            optimizer.state[parameter][key] = value


def use_alone(model: nn.Module) -> None:
    """Make the DDP wrappers in a model call what they wrap, and nothing else: DDP's own forward may communicate."""
    for module in model.modules():
        if isinstance(module, nn.parallel.DistributedDataParallel):
            module.require_backward_grad_sync = module.require_forward_param_sync = False
            vars(module)["forward"] = module.module.__call__


class WholePipeline:
    """Stands in for a `Pipeline` on one rank: its step runs the whole model on the whole batch.

    Args:
        plain: The whole model.
        loss: The pipeline's own loss.
    """

    is_first = is_last = True

    def __init__(self, plain: nn.Module, loss: Any) -> None:
        self.module = plain
        self._loss = loss

    def __call__(self, *args: Any) -> Any:
        with torch.no_grad():
            return self.module(*args)

    def step(self, x: Any = None, target: Any = None, loss: Any = None) -> torch.Tensor:
        """Run forward and backward; return the loss, shape (1,)."""
        value = (loss or self._loss)(self.module(*x) if isinstance(x, tuple) else self.module(x), target)
        value.backward()
        return torch.as_tensor(value).detach().reshape(1)

    def parameters(self) -> Any:
        """Return the parameters of the whole model."""
        return self.module.parameters()

    def clip_grad_norm(self, max_norm: float, *, norm_type: float = 2.0, error_if_nonfinite: bool = False) -> float:
        """Clip the gradients of the whole model."""
        norm = nn.utils.clip_grad_norm_(self.parameters(), max_norm, norm_type, error_if_nonfinite)
        return float(norm)
