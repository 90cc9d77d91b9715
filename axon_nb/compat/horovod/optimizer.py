"""DistributedOptimizer, which steps with gradients reduced over ranks; broadcast of parameters and objects."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import cloudpickle
import torch
import torch.distributed as dist
from torch import nn

from axon_nb.comm import broadcast
from axon_nb.compat.horovod import collectives
from axon_nb.errors import UsageError


class _ReducingOptimizer(torch.optim.Optimizer):
    """Mixin that `DistributedOptimizer` adds to the optimizer's class."""

    _names: dict[torch.Tensor, str]
    _compression: type[collectives.Compressor]
    _op: collectives.Op
    _predivide: float
    _plain: type[torch.optim.Optimizer]
    """The original class."""
    _should_synchronize: bool

    @torch.no_grad()
    def synchronize(self) -> None:
        """Reduce all gradients, for example to clip them; then `step` within `skip_synchronize`.

        A gradient that a rank has not computed counts as zero; a sparse gradient becomes dense.
        """
        groups: dict[tuple[torch.dtype, torch.device], list[Any]] = {}
        for parameter in (each for group in self.param_groups for each in group["params"] if each.requires_grad):
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            elif parameter.grad.is_sparse:
                parameter.grad = parameter.grad.to_dense()
            groups.setdefault((parameter.dtype, parameter.device), []).append(parameter)
        items, buffers, contexts = [], [], []
        for group in groups.values():
            for parameter in group:
                name = self._names.get(parameter, "a parameter")
                items.append(f"{self._op.name.title()} of the gradient of {name}, {collectives.describe(parameter)}")
            gradients = torch.cat([parameter.grad.reshape(-1) for parameter in group])
            buffer, context = self._compression.compress(gradients / self._predivide)
            buffers.append(buffer)
            contexts.append(context)
        collectives.reduce_buffers("step", None, tuple(items), buffers, self._op)
        for group, buffer, context in zip(groups.values(), buffers, contexts, strict=True):
            gradients = self._compression.decompress(buffer, context) * self._predivide
            for parameter, part in zip(group, gradients.split([each.numel() for each in group]), strict=True):
                parameter.grad.copy_(part.view(parameter.shape))

    @contextlib.contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Make `step` skip the reduction, because `synchronize` was already called."""
        self._should_synchronize = False
        try:
            yield
        finally:
            self._should_synchronize = True

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Reduce all gradients, then step; a closure's gradients are reduced on each call."""
        if closure is None:
            if self._should_synchronize:
                self.synchronize()
            return super().step()

        def reduced() -> Any:
            loss = closure()
            if self._should_synchronize:
                self.synchronize()
            return loss

        return super().step(reduced)

    # torch wraps a class's `step` without this mark, for hooks and the profiler. Wrapping the inner one is enough, and
    # keeps the waiting here out of the step.
    step.hooked = True  # type: ignore[attr-defined]


def DistributedOptimizer(
    optimizer: torch.optim.Optimizer,
    named_parameters: Iterable[tuple[str, torch.Tensor]] | None = None,
    compression: type[collectives.Compressor] = collectives.Compression.none,
    backward_passes_per_step: int = 1,
    op: int = collectives.Op.AVERAGE,
    gradient_predivide_factor: float = 1.0,
) -> Any:
    """Wrap an optimizer so that `step` reduces its gradients over ranks first.

    Args:
        optimizer: Any torch optimizer; its parameters, state and options are shared.
        named_parameters: ``model.named_parameters()``; the names are used in messages.
        compression: Compression of gradients for communication.
        backward_passes_per_step: Number of backward passes before each `step`; their gradients are summed.
        op: Average or Sum.
        gradient_predivide_factor: A factor for Average: gradients are divided by it before the sum and multiplied by it
            afterwards.

    Returns:
        An instance of a subclass of the optimizer's class, with `synchronize` and `skip_synchronize`.

    Raises:
        NotInitializedError: `hvd.init()` was not called.
        UsageError: A value is invalid.
    """
    collectives.current()
    reduce_op = collectives.as_op(op)
    if gradient_predivide_factor != 1.0 and reduce_op is not collectives.Op.AVERAGE:
        raise UsageError("gradient_predivide_factor not supported with op != Average: leave it out, or use Average.")
    if gradient_predivide_factor <= 0:
        raise UsageError(f"gradient_predivide_factor must be > 0; got {gradient_predivide_factor}.")
    if backward_passes_per_step <= 0:
        raise UsageError(f"backward_passes_per_step={backward_passes_per_step}: must be > 0.")
    plain = optimizer._plain if isinstance(optimizer, _ReducingOptimizer) else type(optimizer)
    attributes = {"__module__": plain.__module__, "__doc__": plain.__doc__}
    reducing: Any = type(plain.__name__, (_ReducingOptimizer, plain), attributes)
    wrapped: Any = reducing.__new__(reducing)
    # Except `step`, which may be a scheduler's wrapper of the original optimizer's method.
    vars(wrapped).update({name: value for name, value in vars(optimizer).items() if name != "step"})
    wrapped._plain, wrapped._should_synchronize = plain, True
    wrapped._names = {parameter: name for name, parameter in named_parameters or ()}
    wrapped._compression, wrapped._op, wrapped._predivide = compression, reduce_op, gradient_predivide_factor
    return wrapped


def broadcast_parameters(params: Mapping[str, Any] | Iterable[Any], root_rank: int) -> None:
    """Broadcast tensors from one rank to all ranks, in place.

    Args:
        params: ``model.state_dict()``, ``model.named_parameters()`` or ``model.parameters()``.
        root_rank: Rank of the source.

    Raises:
        UsageError: An entry is not a tensor.
        HorovodInternalError: A tensor differs in name, shape or dtype between ranks; the message names it.
    """
    if isinstance(params, Mapping):
        entries: list[tuple[str, Any]] = sorted(params.items())
    elif hasattr(params, "__iter__") and not isinstance(params, str | torch.Tensor):
        entries = [item if isinstance(item, tuple) else (f"entry {i}", item) for i, item in enumerate(params)]
    else:
        raise UsageError(f"invalid params of type: {type(params)}; use model.state_dict() or model.named_parameters().")
    others = [name for name, value in entries if not isinstance(value, torch.Tensor)]
    if others:
        raise UsageError(f"broadcast_parameters: {others[0]} is not a tensor: use hvd.broadcast_object for it.")
    root = collectives.check_root(root_rank)
    items = tuple(f"{name}: {collectives.describe(tensor)} with root rank {root}" for name, tensor in entries)
    collectives.agree(collectives.Call("broadcast_parameters", None, items))
    for handle in [broadcast(tensor.detach(), src=root, async_op=True) for _, tensor in entries]:
        handle.wait()


def broadcast_optimizer_state(optimizer: torch.optim.Optimizer, root_rank: int, model: nn.Module | None = None) -> None:
    """Broadcast optimizer state and options, such as the learning rate, from one rank to all ranks.

    Args:
        optimizer: A torch optimizer, distributed or not, over the same parameters on all ranks.
        root_rank: Rank of the source.
        model: Ignored; for compatibility with Horovod.
    """
    is_root = collectives.current().rank == collectives.check_root(root_rank)
    file = io.BytesIO()
    if is_root:
        torch.save(optimizer.state_dict(), file)
    content = broadcast_object(file.getvalue(), root_rank)
    if not is_root:
        # By way of the CPU: the root's device may not be this rank's.
        optimizer.load_state_dict(torch.load(io.BytesIO(content), map_location="cpu", weights_only=False))


def broadcast_object(obj: Any, root_rank: int = 0, name: str | None = None) -> Any:
    """Broadcast an object from one rank to all ranks.

    Args:
        obj: Any picklable object; ignored on ranks other than the root.
        root_rank: Rank of the source.
        name: Name for messages; it must be the same on all ranks.

    Returns:
        The object itself on the root, a copy elsewhere.
    """
    root = collectives.check_root(root_rank)
    is_root = collectives.current().rank == root
    contents: list[Any] = [cloudpickle.dumps(obj) if is_root else None]
    collectives.agree(collectives.Call("broadcast_object", name, (f"root rank {root}",)))
    dist.broadcast_object_list(contents, src=root)
    return obj if is_root else cloudpickle.loads(contents[0])
