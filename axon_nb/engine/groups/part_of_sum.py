"""reduce_scatter on Gloo as what it is inside, an all_reduce of a copy of which each rank keeps a part, but in sight.

Gloo's own handle for it ignores the limit of a wait, so that it can be waited for in another thread alone: two
switches of threads a call. The handle of the all_reduce takes a limit. The sums are the same, bit for bit.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

__all__ = ["PartOfSum", "in_sight"]

c10d: Any = dist.distributed_c10d
_num_modes: Any = getattr(torch._C, "_len_torch_dispatch_stack", None)  # private; without it nothing is in sight


class PartOfSum:
    """The handle of one such call.

    Args:
        work: Of the all_reduce.
        part: This rank's rows of what is summed.
        output: Where they go when the sum is there.
    """

    def __init__(self, work: Any, part: torch.Tensor, output: torch.Tensor) -> None:
        self._work = work
        self._part: torch.Tensor | None = part
        self._output = output
        self._taking = threading.Lock()

    def _take(self) -> None:
        with self._taking:  # a future's callback has a thread of its own, and who waits goes on with the whole output
            part, self._part = self._part, None
            if part is not None:
                self._output.copy_(part)

    def wait(self, timeout: timedelta) -> bool:
        """Wait for the result; a wait that ends at its limit can be repeated.

        Raises:
            RuntimeError: it failed, or the limit is over.
        """
        self._work.wait(timeout)
        self._take()
        return True

    def is_completed(self) -> bool:
        """Whether the result is there."""
        if not self._work.is_completed():
            return False
        self._take()
        return True

    def is_success(self) -> bool:
        """Whether it succeeded."""
        return bool(self._work.is_success())

    def exception(self) -> Any:
        """Its failure."""
        return self._work.exception()

    def result(self) -> list[torch.Tensor]:
        """Its output."""
        return [self._output]

    def get_future(self) -> Any:
        """A future of the output."""

        def take(done: Any) -> list[torch.Tensor]:
            done.value()
            self._take()
            return [self._output]

        return self._work.get_future().then(take)


def in_sight(original: Callable[..., Any]) -> Callable[..., Any]:
    """`reduce_scatter_single` of a group of torch's on Gloo; what it does not take is left to `original`."""

    def operation(inner: Any, *args: Any, **kwargs: Any) -> Any:
        if kwargs or len(args) != 3 or not _fits(args[0], args[1], inner.size()):
            return original(inner, *args, **kwargs)
        output, tensor, opts = args
        options = c10d.AllreduceOptions()
        options.reduceOp, options.timeout, options.asyncOp = opts.reduceOp, opts.timeout, opts.asyncOp
        whole, rows = tensor.detach().clone(), output.shape[0]
        start = inner.rank() * rows
        return PartOfSum(inner.allreduce([whole], options), whole[start : start + rows], output.detach())

    return operation


def _fits(output: Any, tensor: Any, size: int) -> bool:
    return bool(
        _num_modes is not None
        and not _num_modes()  # a mode that looks on, such as one that counts calls, is to see the call that was made
        and type(output) is type(tensor) is torch.Tensor
        and output.dtype is tensor.dtype
        and output.device == tensor.device
        and output.layout is tensor.layout is torch.strided
        and tensor.is_contiguous()
        and output.ndim == tensor.ndim > 0
        and tensor.numel()
        and output.shape[0] * size == tensor.shape[0]
        and output.shape[1:] == tensor.shape[1:]
    )
