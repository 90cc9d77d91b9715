"""CUDA graphs that outlive the communicators of their collectives: a recovery on NCCL mentions them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from axon_nb.engine.groups import recovery
from axon_nb.engine.groups.recovery import graphs_to_capture
from tests.engine.groups.native_ranks import GLOO, join_native, run_on_ranks


class Graph:
    """Stands for `torch.cuda.CUDAGraph`, which needs a GPU."""


KIND = (__name__, "Graph")
SENTENCE = "CUDA graphs still hold the communicators of before: capture those that contain collectives again."


def test_surviving_cuda_graphs_need_recapture() -> None:
    assert graphs_to_capture(KIND) == []
    graph = Graph()
    assert graphs_to_capture(KIND) == [SENTENCE]
    del graph
    assert graphs_to_capture(KIND) == []


def _recovers(rank: int, store: Any) -> list[str]:

    join_native(rank, store, 2, kind=GLOO)
    recovery.graphs_to_capture.__defaults__ = (KIND,)
    kept = [Graph()] if rank == 0 else []
    said = recovery.recover(3).not_reset
    kept.clear()
    return [*said, *recovery.recover(4).not_reset]


def test_recovery_mentions_surviving_cuda_graphs(tmp_path: Path) -> None:
    assert run_on_ranks(_recovers, 2, tmp_path) == {0: [SENTENCE], 1: []}
