"""Small, readable models for experiments: a byte-level GPT, an MLP and a CNN, and text to train the GPT on."""

from __future__ import annotations

from axon_nb.parallel.models.gpt import GPT, Attention, Block, Embedding, GPTConfig, Head, next_byte_loss
from axon_nb.parallel.models.small import CNN, MLP, standard_library, windows

__all__ = [
    "CNN",
    "GPT",
    "MLP",
    "Attention",
    "Block",
    "Embedding",
    "GPTConfig",
    "Head",
    "next_byte_loss",
    "standard_library",
    "windows",
]
