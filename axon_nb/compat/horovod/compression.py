"""Compression of gradients for communication."""

from __future__ import annotations

from typing import Any

import torch


class Compressor:
    """No compression, and the base class of compressors; pass a subclass as ``compression=MyCompressor``."""

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """Return the compressed tensor, of the same shape on all ranks, and a context for `decompress`."""
        return tensor, None

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
        """Return the tensor in its original dtype and shape."""
        return tensor


class _FP16Compressor(Compressor):
    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        return (tensor.half() if tensor.is_floating_point() else tensor), tensor.dtype

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
        return tensor.to(ctx)


class Compression:
    """The available compressors: `none`, and `fp16`, which sends floating-point tensors as float16."""

    none = Compressor
    fp16 = _FP16Compressor
