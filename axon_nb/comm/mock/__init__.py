"""The machinery of worlds inside one process: who runs when, where calls meet, torch's group API on top."""

from __future__ import annotations

from axon_nb.comm.mock.backend import MockBackend
from axon_nb.comm.mock.group import NAME, MockGroup
from axon_nb.comm.mock.hub import Hub
from axon_nb.comm.mock.torch_world import RankContext, isolated_threads, missing
from axon_nb.comm.mock.turns import Turns

__all__ = ["NAME", "Hub", "MockBackend", "MockGroup", "RankContext", "Turns", "isolated_threads", "missing"]
