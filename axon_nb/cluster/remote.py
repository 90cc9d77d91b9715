"""Calling a function on a rank by its name: ipyparallel's `apply`, without importing the rank's side here."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any

from axon_nb.cluster.client import RankClient

__all__ = ["call"]


def _invoke(target: str, arguments: dict[str, Any]) -> Any:
    import importlib

    module, _, function = target.partition(":")
    return getattr(importlib.import_module(module), function)(**arguments)


def call(client: RankClient, rank: int, target: str, /, **arguments: Any) -> Future[Any]:
    """Call `target` (``module:function``) on one rank when its main thread is free; a future of the result."""
    view = client.direct_view(rank)
    result: Future[Any] = view.apply_async(_invoke, target, arguments)
    return result
