"""A tensor of one element may have any stride, and torch views only some of them as bytes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from axon_nb.comm.collectives.arguments import prepare_move
from axon_nb.engine.values import tensor_bytes
from axon_nb.parallel.checkpoint.saving import _bytes
from axon_nb.shell.value_pickle import pack, unpack


def _packed(tensor: torch.Tensor) -> bytes:
    found: Any = unpack([bytearray(part) for part in pack(tensor)])
    return bytes(found.clone().view(torch.uint8).numpy())


WAYS: dict[str, Callable[[torch.Tensor], bytes]] = {
    "digest of a variable": tensor_bytes,
    "push and pull": _packed,
    "checkpoint": lambda tensor: bytes(_bytes(tensor)),
    "collective": lambda tensor: bytes(prepare_move(tensor).buffer.numpy()),
}


@pytest.mark.parametrize("way", WAYS)
def test_single_element_of_any_stride_is_sent_as_bytes(way: str) -> None:
    tensor = torch.arange(16, dtype=torch.int16)[8::8]
    assert tensor.stride() == (8,)
    assert WAYS[way](tensor) == bytes([8, 0])
