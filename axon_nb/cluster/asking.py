"""Asking ranks what they do now."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable

from axon_nb.cluster.client import RankClient
from axon_nb.records.state import Activity, RankState

__all__ = ["sample"]

_SAMPLE_S = 1.0


def sample(client: RankClient, ranks: Iterable[int]) -> dict[int, RankState]:
    """What each rank does now, over the control channel; those that do not answer in a second are left out."""
    futures = {}
    for rank in ranks:
        with contextlib.suppress(KeyError):  # unregistered meanwhile
            futures[rank] = client.request(rank, "axon_status")
    end = time.monotonic() + _SAMPLE_S
    states = {}
    for rank, future in futures.items():
        if future.wait(max(0.0, end - time.monotonic())):
            content = future.result()["content"]
            if "error" not in content:
                states[rank] = RankState(**{**content, "activity": Activity(content["activity"])})
    return states
