"""Compatibility with other frameworks: Horovod's API, and hooks for Accelerate, DeepSpeed and torch.compile."""

from __future__ import annotations

__all__: list[str] = []
