"""BatchNorm with statistics over all ranks, on CPUs too: torch's own supports GPU tensors only."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parameter import is_lazy

from axon_nb.comm.collectives.reduction import all_reduce_sum
from axon_nb.comm.errors import TensorError
from axon_nb.comm.group import GroupLike, ProcessGroup, resolve


class SyncBatchNorm(_BatchNorm):
    """Normalises with the mean and variance over the samples of all ranks; batch sizes may differ between ranks.

    With it, training on parts of a batch gives the same result as one process with the whole batch. DDP alone does not:
    each rank normalises with its own samples. `SyncBatchNorm.convert(model)` replaces every BatchNorm of a model.
    Not a subclass of torch.nn.SyncBatchNorm, which DDP accepts on GPUs only.
    """

    group: GroupLike | Any = None
    """The ranks whose samples count; None means all."""

    @classmethod
    def convert(cls, model: nn.Module, *, group: GroupLike | Any = None) -> nn.Module:
        """Replace every BatchNorm of `model` by one with the same weights and statistics. Call it before `DDP(model)`.

        Args:
            model: The model; changed in place, unless it is itself a BatchNorm.
            group: The ranks whose samples count; None means all.

        Raises:
            TensorError: a lazy BatchNorm has not been initialized yet, or a subclass has a forward of its own.
        """
        if isinstance(model, _BatchNorm):
            kind = type(model)
            if kind.forward is not cls.forward and not kind.forward.__module__.startswith("torch.nn."):
                raise TensorError(
                    f"{kind.__name__} has a forward of its own, which a SyncBatchNorm would drop: let a module of your "
                    "own call a BatchNorm instead of extending it."
                )
            if any(is_lazy(item) for item in (*model.parameters(), *model.buffers())):
                raise TensorError(
                    f"{type(model).__name__} is lazy and has no shape yet; run the model on a sample first."
                )
            converted = cls.__new__(cls)
            vars(converted).update(vars(model))
            converted.group = group
            return converted
        for name, child in model.named_children():
            setattr(model, name, cls.convert(child, group=group))
        return model

    def _check_input_dim(self, input: torch.Tensor) -> None:  # noqa: A002 - torch's name
        if input.ndim < 2:
            raise TensorError(
                f"SyncBatchNorm needs a tensor of shape (samples, channels, …); got shape {tuple(input.shape)}."
            )

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002 - torch's name
        """Normalise a tensor of shape (samples, channels, …).

        Raises:
            TensorError: all ranks together have only one value per channel, which has no variance.
        """
        if not self.training and self.running_mean is not None:
            return super().forward(input)
        self._check_input_dim(input)
        group = resolve(self.group)
        dims = [dim for dim in range(input.ndim) if dim != 1]
        shape = [1, -1] + [1] * (input.ndim - 2)
        values = input.float() if input.dtype in (torch.float16, torch.bfloat16) else input
        own_count = values.new_tensor([values.numel() // values.shape[1]])
        sums = _sum_over_ranks(torch.cat([values.sum(dims), own_count]), group)
        count = sums[-1].detach()
        if count < 2:
            raise TensorError(
                f"SyncBatchNorm needs at least 2 values per channel over all ranks to train; got {int(count)}."
            )
        mean = sums[:-1] / count
        centred = values - mean.view(shape)
        variance = _sum_over_ranks(centred.square().sum(dims), group) / count
        self._update_running_stats(mean.detach(), variance.detach(), count)
        out = centred * torch.rsqrt(variance + self.eps).view(shape)
        if self.affine:
            out = out * self.weight.view(shape) + self.bias.view(shape)
        return out.to(input.dtype)

    @torch.no_grad()
    def _update_running_stats(self, mean: torch.Tensor, variance: torch.Tensor, count: torch.Tensor) -> None:
        if not self.training or self.running_mean is None or self.running_var is None:
            return
        assert self.num_batches_tracked is not None
        self.num_batches_tracked.add_(1)
        share = 1.0 / float(self.num_batches_tracked) if self.momentum is None else self.momentum
        self.running_mean.lerp_(mean.to(self.running_mean.dtype), share)
        self.running_var.lerp_((variance * count / (count - 1)).to(self.running_var.dtype), share)


class _Sum(torch.autograd.Function):
    """Sum over ranks. Each rank's result depends on each rank's input, so gradients are summed as well."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, group: ProcessGroup) -> torch.Tensor:
        """Sum the inputs over ranks."""
        ctx.group = group
        total: torch.Tensor = all_reduce_sum(tensor.clone(), group=group)
        return total

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        """Sum the gradients over ranks."""
        return all_reduce_sum(gradients[0].clone(), group=ctx.group), None


def _sum_over_ranks(tensor: torch.Tensor, group: ProcessGroup) -> torch.Tensor:
    total: torch.Tensor = _Sum.apply(tensor, group)  # type: ignore[no-untyped-call]
    return total
