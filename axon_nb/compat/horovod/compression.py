"""Compression of gradients for communication."""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["Compression", "Compressor", "FP16Compressor", "NoneCompressor"]


class Compressor:
    """Base class of compressors with two static methods; pass a subclass as ``compression=MyCompressor``."""

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """Return the compressed tensor, of the same shape on all ranks, and a context for `decompress`."""
        raise NotImplementedError("a Compressor must define a static method compress(tensor) -> (tensor, context).")

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
        """Return the tensor in its original dtype and shape."""
        raise NotImplementedError("a Compressor must define a static method decompress(tensor, context) -> tensor.")


class NoneCompressor(Compressor):
    """No compression."""

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """Return the tensor itself."""
        return tensor, None

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
        """Return the tensor itself."""
        return tensor


class FP16Compressor(Compressor):
    """Compresses floating-point tensors to float16."""

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """Convert to float16; integers stay unchanged."""
        return (tensor.half() if tensor.is_floating_point() else tensor), tensor.dtype

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
        """Convert back to the original dtype."""
        return tensor.to(ctx)


class Compression:
    """The available compressors."""

    none = NoneCompressor
    """No compression (default)."""
    fp16 = FP16Compressor
    """Send floating-point tensors as float16."""
