"""What is done to gradients before they travel, and undone afterwards."""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["Compression", "Compressor", "FP16Compressor", "NoneCompressor"]


class Compressor:
    """Base of compressors: two static methods. A class of one's own is given as ``compression=MyCompressor``."""

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """What travels, of the same shape on all ranks, and what `decompress` needs besides."""
        raise NotImplementedError("a Compressor has a static method compress(tensor) -> (tensor, context).")

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
        """The tensor in its first dtype and shape."""
        raise NotImplementedError("a Compressor has a static method decompress(tensor, context) -> tensor.")


class NoneCompressor(Compressor):
    """Tensors travel as they are."""

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """The tensor itself."""
        return tensor, None

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
        """The tensor itself."""
        return tensor


class FP16Compressor(Compressor):
    """Floating-point tensors travel in 16 bits, half of float32's bytes."""

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """In float16; whole numbers as they are."""
        return (tensor.half() if tensor.is_floating_point() else tensor), tensor.dtype

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
        """In the dtype that it had."""
        return tensor.to(ctx)


class Compression:
    """The compressors that are there."""

    none = NoneCompressor
    """Tensors travel as they are; the default."""
    fp16 = FP16Compressor
    """Floating-point tensors travel in 16 bits."""
