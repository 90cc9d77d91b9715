"""Models that ask for a card, made where there is none.

Without CUDA a tensor without data on ``cuda`` ends the process (torch 2.11 to 2.13: "Cannot initialize CUDA without
ATen_cuda library", from C++). A plan depends on shapes and dtypes alone, so what
asks for a card gets the device at hand.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.overrides import TorchFunctionMode

__all__ = ["WithoutCuda"]

_HERE = ("cpu", "meta")


class WithoutCuda(TorchFunctionMode):
    """Within, tensors that are to be on a card stay where they are, and new ones are made on the default device."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call a function of torch's with another device than a card."""
        kwargs = dict(kwargs or {})
        own = args[0].device if args and isinstance(args[0], torch.Tensor) else None
        if func is torch.Tensor.cuda:
            return args[0]
        if own is not None and func is torch.Tensor.to and len(args) > 1 and _is_card(args[1]):
            args = (args[0], own, *args[2:])
        if _is_card(kwargs.get("device")):
            del kwargs["device"]
            if own is not None:
                kwargs["device"] = own
        return func(*args, **kwargs)


def _is_card(device: Any) -> bool:
    if isinstance(device, int) and not isinstance(device, bool):
        return True
    if isinstance(device, str):
        device = torch.device(device)
    return isinstance(device, torch.device) and device.type not in _HERE
