"""`%shards`: which rank holds which part of which tensor, live while cells run."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from axon_nb.cluster.cluster import Cluster
from axon_nb.cluster.inspection.shards import LayoutRequest
from axon_nb.records.placement import Shard
from axon_nb.records.ranks import name_ranks
from axon_nb.records.units import format_bytes
from axon_nb.widgets.assets import script, style
from axon_nb.widgets.panel import LivePanel
from axon_nb.widgets.shards.boxes import draw
from axon_nb.widgets.shards.mesh import Mesh, find_mesh
from axon_nb.widgets.shards.page import heading, local_sizes, shards_bundle, shown_shape
from axon_nb.widgets.shards.tensors import (
    PlacedTensor,
    bytes_by_rank,
    describe_placement,
    merge_shards,
    ranks_by_bytes,
)
from axon_nb.widgets.view import LiveView

_MAX_TENSORS = 2000
_MIN_INTERVAL_S = 2.0


class ShardsView(LiveView):
    """The parts of tensors as pictures, with a filter, and as a treemap by bytes.

    Args:
        title: What is shown, such as ``model``.
        shards: The parts on all ranks.
        notes: Sentences below.
    """

    _esm = script("shards")
    _css = style("shards")

    def __init__(self, title: str, shards: Sequence[Shard], notes: Sequence[str] = ()) -> None:
        self._title = title
        self._tensors, self._notes = _first_tensors(shards, notes)
        self._mesh = find_mesh(shards)
        self._bundle: dict[str, str] | None = None
        super().__init__()

    def show(self, shards: Sequence[Shard], notes: Sequence[str] = ()) -> bool:
        """Show these parts instead; from any thread.

        Returns:
            Whether they differ from those shown before.
        """
        tensors = _first_tensors(shards, notes)
        with self._lock:
            if tensors == (self._tensors, self._notes):
                return False
            self._tensors, self._notes = tensors
            self._mesh = find_mesh(shards)
            self._bundle = None
        self.refresh()
        return True

    def to_bundle(self) -> dict[str, str]:
        """Return what is shown now as `text/html` and `text/plain`, which need neither a kernel nor scripts."""
        with self._lock:
            if self._bundle is None:
                self._bundle = shards_bundle(self._title, self._tensors, self._notes)
            return self._bundle

    def make_content(self) -> dict[str, Any]:
        """Return the tensors; they refer to drawings by number, because many are alike."""
        drawings: dict[str, int] = {}
        rows = [_row(tensor, drawings) for tensor in self._tensors]
        return {
            "heading": heading(self._title, self._tensors),
            "totals": _totals(self._tensors),
            "mesh": _mesh_cells(self._mesh, bytes_by_rank(self._tensors)),
            "tensors": rows,
            "drawings": [json.loads(drawing) for drawing in drawings],
            "notes": list(self._notes),
        }


def _first_tensors(shards: Sequence[Shard], notes: Sequence[str]) -> tuple[list[PlacedTensor], list[str]]:
    tensors = merge_shards(shards)
    num_omitted = len(tensors) - _MAX_TENSORS
    omitted = [f"{num_omitted} more tensors are left out: name a part of the model."] if num_omitted > 0 else []
    return tensors[:_MAX_TENSORS], [*notes, *omitted]


def _row(tensor: PlacedTensor, drawings: dict[str, int]) -> dict[str, Any]:
    drawing = asdict(draw(tensor))
    return {
        "name": tensor.name,
        "role": tensor.role,
        "kind": tensor.kind,
        "shape": shown_shape(tensor),
        "placement": describe_placement(tensor),
        "local": local_sizes(tensor),
        "bytes": tensor.bytes,
        "total": format_bytes(tensor.bytes),
        "drawing": drawings.setdefault(json.dumps(drawing), len(drawings)),
    }


def _mesh_cells(mesh: Mesh, sizes: Mapping[int, int]) -> dict[str, Any]:
    cells = [
        {"rank": rank, "place": place, "size": format_bytes(sizes.get(rank, 0))}
        for rank, place in zip(mesh.ranks, mesh.places, strict=True)
    ]
    return {"title": mesh.title, "columns": mesh.columns, "cells": cells}


def _totals(tensors: Sequence[PlacedTensor]) -> list[dict[str, Any]]:
    total_bytes = bytes_by_rank(tensors)
    highest = max(total_bytes.values(), default=0) or 1
    return [
        {
            "ranks": name_ranks(ranks),
            "size": f"{format_bytes(size)}{' each' if len(ranks) > 1 else ''}",
            "share": size / highest,
        }
        for size, ranks in ranks_by_bytes(total_bytes)
    ]


class ShardsPanel(LivePanel):
    """A panel that polls at most every two seconds.

    Args:
        cluster: The cluster whose ranks are polled.
        names: Variables of the ranks.
        gradients: Whether to show gradients, too.

    Raises:
        UsageError: No rank has a variable of that name with tensors.
    """

    def __init__(self, cluster: Cluster, names: Sequence[str], *, gradients: bool = False) -> None:
        super().__init__(cluster, min_interval_s=_MIN_INTERVAL_S)
        self._request = LayoutRequest(cluster.state, names, gradients=gradients)
        self.view: ShardsView = ShardsView(", ".join(names), *self._request.send())

    def poll(self) -> float:
        """Query the ranks and show their parts if these have changed."""
        shards, notes = self._request.send()
        if self._request.has_changed:
            self.view.show(shards, notes)
        return self._request.cost_s
