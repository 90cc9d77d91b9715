"""Communication between ranks: a library of its own, in cells, under torchrun and in plain scripts."""

from __future__ import annotations

from axon_nb.comm.world import World

__all__ = ["World"]
