"""Builds models that request CUDA where there is none.

Without CUDA a fake tensor on ``cuda`` aborts the process (torch 2.11 to 2.13: "Cannot initialize CUDA without ATen_cuda
library", from C++). A plan depends only on shapes and dtypes, so such requests get the device at hand.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.overrides import TorchFunctionMode

__all__ = ["WithoutCuda"]

_OTHER_DEVICES = ("cpu", "meta")


class WithoutCuda(TorchFunctionMode):
    """Inside, moves to CUDA are ignored, and new tensors are made on the default device."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call a torch function with any CUDA device removed."""
        kwargs = dict(kwargs or {})
        own = args[0].device if args and isinstance(args[0], torch.Tensor) else None
        if func is torch.Tensor.cuda:
            return args[0]
        if own is not None and func is torch.Tensor.to and len(args) > 1 and _is_cuda(args[1]):
            args = (args[0], own, *args[2:])
        if _is_cuda(kwargs.get("device")):
            del kwargs["device"]
            if own is not None:
                kwargs["device"] = own
        return func(*args, **kwargs)


def _is_cuda(device: Any) -> bool:
    if isinstance(device, int) and not isinstance(device, bool):
        return True
    if isinstance(device, str):
        device = torch.device(device)
    return isinstance(device, torch.device) and device.type not in _OTHER_DEVICES
