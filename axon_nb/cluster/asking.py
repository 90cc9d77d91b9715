"""Asking ranks what they do now, and ending those of other launchers."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable
from typing import TYPE_CHECKING

from axon_nb.cluster.client import RankClient
from axon_nb.cluster.launching import stop_engines
from axon_nb.records.state import Activity, RankState

if TYPE_CHECKING:
    from axon_nb.cluster.cluster import Cluster

__all__ = ["sample", "shut_down_foreign"]

_SAMPLE_S = 1.0
_SHUTDOWN_S = 30.0
"""Seconds for the engines to end before their controller does.

ipyparallel's nanny of an engine never ends when the controller goes while an answer is on its way to it
(its control socket lingers without limit; seen with 9.1), so a busy machine gets time.
"""


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


def shut_down_foreign(cluster: Cluster) -> None:
    """End the engines of other launchers than ours; the host agent ends its own."""
    if cluster.launched is not None:
        stop_engines(cluster.launched, cluster.engines)
    elif cluster.engines != "axon":
        with contextlib.suppress(Exception):
            cluster.client.shutdown(targets="all", hub=False, block=False)
            # A client that closes before the request is out takes it along.
            cluster.client.wait_unregistered(range(cluster.world_size), _SHUTDOWN_S)
