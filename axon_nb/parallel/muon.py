"""Muon for matrices that are sharded over ranks: each update is that of the whole matrix.

Jordan et al., Muon: An optimizer for hidden layers in neural networks (2024). `torch.optim.Muon` (2.13) orthogonalizes
a DTensor through DTensor's own products, whose sums over ranks are rounded in bfloat16: an update of a tall matrix is
off by up to 5 %. It refuses stacks of matrices, such as experts, and orthogonalizes the parts of plain tensors each by
itself.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from axon_nb.comm.collectives.movement import all_to_all
from axon_nb.comm.errors import InvalidArgumentError
from axon_nb.comm.group import ProcessGroup, resolve
from axon_nb.comm.placements import Placed, part_shape, placed


class Muon(torch.optim.Optimizer):
    """Momentum whose update is orthogonalized: `torch.optim.Muon` that also knows sharded matrices.

    Matrices that are sharded over one axis of ranks (FSDP2, HSDP, declared placements) are gathered in turns: one on
    each rank, so that every rank works and none holds more than one whole matrix. In a step each rank sends and
    receives its part twice, in bfloat16: 4 bytes for each of its elements. Momentum stays sharded. Matrices that are
    sharded over several axes are gathered on all their ranks. Other tensors are taken as whole, on every rank that
    holds them.

    Args:
        params: Matrices, or stacks of matrices (…, rows, columns), each of which is orthogonalized by itself. Leave
            embeddings, output heads and vectors to another optimizer.
        lr: Learning rate.
        weight_decay: Decoupled weight decay, as a factor of `lr`.
        momentum: Share of the earlier momentum, 0 to 1.
        nesterov: Whether the update looks ahead by one step of momentum.
        ns_coefficients: Coefficients of the Newton-Schulz iteration.
        eps: Least norm to divide by.
        ns_steps: Newton-Schulz iterations.
        adjust_lr_fn: ``original``: `lr` times sqrt(max(1, rows / columns)); ``match_rms_adamw``: `lr` times
            0.2 sqrt(max(rows, columns)). None means ``original``.

    Raises:
        InvalidArgumentError: a parameter is not a matrix, or an option is out of range.
    """

    def __init__(  # noqa: PLR0917 - as torch.optim.Muon
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_coefficients: tuple[float, float, float] = (3.4445, -4.775, 2.0315),
        eps: float = 1e-7,
        ns_steps: int = 5,
        adjust_lr_fn: str | None = None,
    ) -> None:
        if not (lr >= 0 and 0 <= momentum <= 1 and weight_decay >= 0):
            raise InvalidArgumentError(
                "lr and weight_decay must be at least 0, and momentum 0 to 1; got "
                f"lr={lr}, weight_decay={weight_decay}, momentum={momentum}."
            )
        if adjust_lr_fn not in (None, "original", "match_rms_adamw"):
            raise InvalidArgumentError(f"adjust_lr_fn must be original or match_rms_adamw; got {adjust_lr_fn!r}.")
        options: dict[str, Any] = {"lr": lr, "weight_decay": weight_decay, "momentum": momentum, "nesterov": nesterov}
        options |= {"ns_coefficients": ns_coefficients, "eps": eps, "ns_steps": ns_steps, "adjust_lr_fn": adjust_lr_fn}
        super().__init__(params, options)
        for parameter in itertools.chain(*(group["params"] for group in self.param_groups)):
            if parameter.ndim < 2:
                raise InvalidArgumentError(
                    f"Muon updates matrices; got a parameter of shape {tuple(parameter.shape)}. Give it to another "
                    "optimizer, such as AdamW."
                )

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the parameters once. Collective among the ranks that share sharded ones.

        Args:
            closure: Computes the loss again and returns it; None: the gradients are there.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
            updates = [self._momentum(parameter, group) for parameter in parameters]
            for index, direction in _orthogonalized(parameters, updates, group):
                parameter = parameters[index]
                parameter.mul_(1 - group["lr"] * group["weight_decay"])
                found = placed(parameter)  # a declared part has a shape of its own
                rows, columns = (parameter if found is None else found).shape[-2:]
                own = parameter.to_local() if isinstance(parameter, DTensor) else parameter
                own.add_(direction, alpha=-_adjusted(group["lr"], group["adjust_lr_fn"], rows, columns))
        return loss

    def _momentum(self, parameter: torch.Tensor, group: dict[str, Any]) -> torch.Tensor:
        """Move the momentum by the gradient, and return this rank's part of what is to be orthogonalized."""
        state, gradient = self.state[parameter], parameter.grad
        assert gradient is not None
        if isinstance(parameter, DTensor) and isinstance(gradient, DTensor):
            gradient = gradient.redistribute(placements=parameter.placements)  # sums of parts, for example
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(gradient)
        buffer = state["momentum_buffer"]
        buffer.lerp_(gradient, 1 - group["momentum"])
        update = gradient.lerp(buffer, group["momentum"]) if group["nesterov"] else buffer.clone()
        # As torch's iteration computes: before anything is sent, it halves the messages.
        return (update.to_local() if isinstance(update, DTensor) else update).bfloat16()


def _orthogonalized(
    parameters: list[torch.Tensor], updates: list[torch.Tensor], options: dict[str, Any]
) -> Iterator[tuple[int, torch.Tensor]]:
    """Yield the index and this rank's part of each orthogonalized update."""
    in_turns: dict[ProcessGroup, list[tuple[int, int, Placed]]] = {}
    by_ranks: dict[tuple[int, ...], ProcessGroup] = {}
    for index, parameter in enumerate(parameters):
        found = placed(parameter)
        split = [] if found is None else _split_axes(found, parameter.ndim)
        if found is None or not split:
            yield index, _orthogonalize(updates[index], options)
        elif len(split) == 1:
            axis, dim = split[0]
            group = resolve(found.mesh.get_group(axis))
            group = by_ranks.setdefault(group.ranks, group)
            in_turns.setdefault(group, []).append((index, dim, found))
        else:
            whole = _orthogonalize(found.as_dtensor(updates[index]).full_tensor(), options)
            yield index, _part_of(whole, found)
    for group, sharded in in_turns.items():
        for start in range(0, len(sharded), group.size()):
            turn = sharded[start : start + group.size()]
            directions = _in_turn(group, [(updates[index], dim, found) for index, dim, found in turn], options)
            yield from zip((index for index, _, _ in turn), directions, strict=True)


def _split_axes(found: Placed, ndim: int) -> list[tuple[int, int]]:
    """Return the axes of the mesh that split a matrix, and the dimension that each splits.

    A stack that is split between its matrices has whole ones on each rank.
    """
    return [
        (axis, placement.dim if placement.is_shard() else -1)
        for axis, placement in enumerate(found.placements)
        if found.mesh.size(axis) > 1
        and not placement.is_replicate()
        and not (placement.is_shard() and placement.dim < ndim - 2)
    ]


def _in_turn(
    group: ProcessGroup, turn: list[tuple[torch.Tensor, int, Placed]], options: dict[str, Any]
) -> list[torch.Tensor]:
    """Gather one update on each rank, orthogonalize it there and return this rank's part of each."""
    size, rank = group.size(), group.rank()
    rest = [0] * (size - len(turn))
    # The sharded dimension comes first, so that a part is one run of elements.
    moved = [update.movedim(dim, 0).contiguous() for update, dim, _ in turn]
    sent = [part.numel() for part in moved] + rest
    received = [0] * size
    if rank < len(turn):
        whole_shapes = [_moved_shape(turn[rank], other, size) for other in range(size)]
        received = [math.prod(shape) for shape in whole_shapes]
    flat = torch.cat([part.flatten() for part in moved])
    gathered = all_to_all(flat, send_sizes=sent, recv_sizes=received, group=group)
    if rank < len(turn):
        pieces = [piece.view(shape) for piece, shape in zip(gathered.split(received), whole_shapes, strict=True)]
        dim = turn[rank][1]
        whole = _orthogonalize(torch.cat(pieces).movedim(0, dim), options).movedim(dim, 0)
        gathered = whole.contiguous().flatten()
    home = all_to_all(gathered, send_sizes=received, recv_sizes=sent, group=group)
    parts = home.split(sent)[: len(turn)]
    return [part.view(own.shape).movedim(0, dim) for part, own, (_, dim, _) in zip(parts, moved, turn, strict=True)]


def _moved_shape(entry: tuple[torch.Tensor, int, Placed], rank: int, size: int) -> list[int]:
    """Return the shape of a rank's part, with the sharded dimension first."""
    _, dim, found = entry
    axis = next(a for a, p in enumerate(found.placements) if p.is_shard() and p.dim == dim and found.mesh.size(a) > 1)
    at = list(found.mesh.get_coordinate() or [])
    at[axis] = rank
    shape = part_shape(found.shape, found.placements, found.mesh.shape, at)
    return [shape[dim], *shape[:dim], *shape[dim + 1 :]]


def _part_of(whole: torch.Tensor, found: Placed) -> torch.Tensor:
    from torch.distributed.tensor import Replicate

    everywhere = DTensor.from_local(whole, found.mesh, [Replicate()] * found.mesh.ndim, run_check=False)
    return everywhere.redistribute(placements=found.placements).to_local()


def _orthogonalize(update: torch.Tensor, options: dict[str, Any]) -> torch.Tensor:
    """Return about U V^T of each matrix U S V^T, as `torch.optim.Muon` computes it, in bfloat16."""
    if update.ndim > 2:  # one by one: a product of stacks is rounded otherwise
        matrices = [_orthogonalize(matrix, options) for matrix in update.flatten(0, -3)]
        return torch.stack(matrices).view_as(update)
    a, b, c = options["ns_coefficients"]
    x = update.bfloat16()
    tall = x.shape[0] > x.shape[1]
    if tall:
        x = x.T
    x = x / x.norm().clamp(min=options["eps"])
    for _ in range(options["ns_steps"]):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if tall else x


def _adjusted(lr: float, rule: str | None, rows: int, columns: int) -> float:
    if rule == "match_rms_adamw":
        return lr * 0.2 * math.sqrt(max(rows, columns))
    return lr * math.sqrt(max(1, rows / columns))
