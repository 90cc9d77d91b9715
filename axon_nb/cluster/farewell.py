"""Telling ipyparallel's controller that an engine is gone: by itself it misses one after half a minute."""

from __future__ import annotations

import contextlib
from pathlib import Path

from axon_nb.cluster.client import RankClient

__all__ = ["tell_controller"]

_LIMIT_S = 2.0


def tell_controller(client_file: Path, rank: int) -> None:
    """Have the controller forget the engine `rank`; where that fails it misses the engine's heartbeat after a while.

    Args:
        client_file: The controller's connection file for clients.
        rank: The engine's id.
    """
    with contextlib.suppress(Exception):  # the controller may be gone as well
        client = RankClient(client_file, timeout=_LIMIT_S)
        try:
            client.unregister(rank)
            client.wait_unregistered([rank], _LIMIT_S)
        finally:
            client.close(linger=0)
