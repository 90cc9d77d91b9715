"""Moving values between the notebook and ranks, and asking ranks something, each with a limit in time."""

from __future__ import annotations

import contextlib
import pickle
import time
from collections.abc import Iterable, Mapping
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

from axon_nb.cluster import remote
from axon_nb.cluster.client import RankClient
from axon_nb.cluster.launching import stop_engines
from axon_nb.errors import UsageError
from axon_nb.records.state import Activity, RankState

if TYPE_CHECKING:
    from axon_nb.cluster.cluster import Cluster

__all__ = ["last_values", "pull", "push", "sample", "shut_down_foreign"]

_ENGINE = "axon_nb.engine.variables"
_SAMPLE_S = 1.0


def push(client: RankClient, ranks: Iterable[int], variables: Mapping[str, Any]) -> None:
    """Put variables into the namespace of ranks; returns when each has them."""
    for name in variables:
        if not name.isidentifier():
            raise UsageError(f"{name!r} is no variable name.")
    futures = {rank: remote.call(client, rank, f"{_ENGINE}:put", variables=dict(variables)) for rank in ranks}
    for rank, future in futures.items():
        _result(rank, future, f"take {', '.join(variables)}")


def pull(client: RankClient, ranks: Iterable[int], expression: str) -> dict[int, Any]:
    """The value of a name or expression on each rank."""
    futures = {rank: remote.call(client, rank, f"{_ENGINE}:fetch", expression=expression) for rank in ranks}
    values = {}
    for rank, future in futures.items():
        kind, value = _result(rank, future, f"give {expression!r}")
        try:
            values[rank] = pickle.loads(value) if kind == "pickled" else value
        except Exception as error:
            raise UsageError(
                f"Rank {rank} has given {expression!r}, but it cannot be loaded in the notebook: "
                f"{type(error).__name__}: {error}"
            ) from None
    return values


def last_values(client: RankClient, ranks: Iterable[int], token: str) -> dict[int, Any]:
    """The value of the last expression of the cell with this token; one that cannot travel comes as its text."""
    futures = {rank: remote.call(client, rank, f"{_ENGINE}:last_value", token=token) for rank in ranks}
    values = {}
    for rank, future in futures.items():
        kind, value, text = _result(rank, future, "give the cell's value")
        # Loaded here and not by ipyparallel: a value that fails there is never delivered, nor is the failure.
        try:
            values[rank] = pickle.loads(value) if kind == "pickled" else value
        except Exception:
            values[rank] = text
    return values


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


def _result(rank: int, future: Future[Any], what: str) -> Any:
    try:
        return future.result()
    except Exception as error:
        ename, evalue = getattr(error, "ename", type(error).__name__), getattr(error, "evalue", str(error))
        raise UsageError(f"Rank {rank} cannot {what}: {ename}: {evalue}") from None


def shut_down_foreign(cluster: Cluster) -> None:
    """End the engines of other launchers than ours; the host agent ends its own."""
    if cluster.launched is not None:
        stop_engines(cluster.launched, cluster.engines)
    elif cluster.engines != "axon":
        with contextlib.suppress(Exception):
            cluster.client.shutdown(targets="all", hub=False, block=False)
