"""`%shards`: which rank holds which part of which tensor, live while cells run.

A view of shards that follows a cluster: asked anew while a cell runs and after each, as long as somebody looks.
"""

from __future__ import annotations

import json
import logging
import threading
import time
import weakref
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import traitlets
from IPython.core.interactiveshell import InteractiveShell
from IPython.display import DisplayHandle, display

from axon_nb.cluster.cluster import Cluster
from axon_nb.cluster.inspection.shards import LayoutRequest
from axon_nb.records.placement import Shard
from axon_nb.records.ranks import name_ranks
from axon_nb.records.units import format_bytes
from axon_nb.widgets.assets import script, style
from axon_nb.widgets.panel import Pace
from axon_nb.widgets.shards.boxes import draw, text_color
from axon_nb.widgets.shards.page import heading, shards_bundle, shown_shape
from axon_nb.widgets.shards.tensors import PlacedTensor, bytes_by_rank, in_words, put_together
from axon_nb.widgets.view import View

__all__ = ["ShardsPanel", "ShardsView"]

_SEEN_S = 12.0
_MAX_TENSORS = 2000


class ShardsView(View):
    """The parts of tensors as pictures, to filter and to look at, and as a treemap by bytes.

    Args:
        title: What is shown, such as ``model``.
        shards: The parts on all ranks.
        notes: Sentences below.
    """

    _esm = script("shards")
    _css = style("shards")

    content = traitlets.Dict().tag(sync=True)
    """What is drawn; tensors refer to drawings by number, as many are alike."""

    def __init__(self, title: str, shards: Sequence[Shard], notes: Sequence[str] = ()) -> None:
        self._lock = threading.Lock()
        self._title = title
        self._seen = 0.0
        self._tensors: list[PlacedTensor] = []
        self._notes: list[str] = []
        self._updates = 0
        self._take(shards, notes)
        super().__init__(content=_content(title, self._tensors, self._notes, self._updates))
        # Held weakly: a view that nobody has any more is not kept by its own callback.
        me = weakref.ref(self)
        self.on_msg(lambda _, message, buffers: _heard(me, message))

    @property
    def watched(self) -> bool:
        """Whether a page has shown it in the last seconds."""
        return time.monotonic() - self._seen < _SEEN_S

    def show(self, shards: Sequence[Shard], notes: Sequence[str] = ()) -> bool:
        """Show these parts instead; from any thread. False when they are those that are shown already."""
        with self._lock:
            if not self._take(shards, notes):
                return False
            content = _content(self._title, self._tensors, self._notes, self._updates)
        self.content = content
        return True

    def to_bundle(self) -> dict[str, str]:
        """What is shown now as `text/html` and `text/plain`, which need neither a kernel nor scripts."""
        with self._lock:
            return shards_bundle(self._title, self._tensors, self._notes)

    def _take(self, shards: Sequence[Shard], notes: Sequence[str]) -> bool:
        tensors = put_together(shards)
        left_out = len(tensors) - _MAX_TENSORS
        told = (
            [*notes, f"{left_out} more tensors are left out: name a part of the model."] if left_out > 0 else [*notes]
        )
        tensors = tensors[:_MAX_TENSORS]
        if (tensors, told) == (self._tensors, self._notes):
            return False
        self._tensors, self._notes = tensors, told
        self._updates += 1
        return True


def _heard(me: weakref.ref[ShardsView], message: dict[str, Any]) -> None:
    view = me()
    if view is not None and message.get("op") == "here":
        view._seen = time.monotonic()


def _content(title: str, tensors: Sequence[PlacedTensor], notes: Sequence[str], updates: int) -> dict[str, Any]:
    drawings: dict[str, int] = {}
    rows = []
    for tensor in tensors:
        drawing = asdict(draw(tensor))
        for box in drawing["boxes"]:
            box["ink"] = text_color(box["color"])
        number = drawings.setdefault(json.dumps(drawing), len(drawings))
        sizes = {part.bytes for part in tensor.parts}
        low, high = format_bytes(min(sizes)), format_bytes(max(sizes))
        rows.append(
            {
                "name": tensor.name,
                "role": tensor.role,
                "kind": tensor.kind,
                "shape": shown_shape(tensor),
                "where": in_words(tensor),
                "each": low if low == high else f"{low} to {high}",
                "bytes": tensor.bytes,
                "total": format_bytes(tensor.bytes),
                "drawing": number,
            }
        )
    return {
        "heading": heading(title, tensors),
        "totals": _totals(tensors),
        "tensors": rows,
        "drawings": [json.loads(drawing) for drawing in drawings],
        "notes": list(notes),
        "updates": updates,
    }


def _totals(tensors: Sequence[PlacedTensor]) -> list[dict[str, Any]]:
    held = bytes_by_rank(tensors)
    most = max(held.values(), default=0) or 1
    groups: dict[int, list[int]] = {}
    for rank, size in held.items():
        groups.setdefault(size, []).append(rank)
    return [
        {
            "ranks": name_ranks(ranks),
            "size": f"{format_bytes(size)}{' each' if len(ranks) > 1 else ''}",
            "part": size / most,
        }
        for size, ranks in groups.items()
    ]


_EVERY_S = 2.0
_log = logging.getLogger("axon_nb.panels")


class ShardsPanel:
    """The widget in one output, and a saved picture of it in a second one that is folded.

    Args:
        cluster: Whose ranks are asked.
        names: Variables of the ranks.
        gradients: Whether gradients are shown besides.

    Raises:
        UsageError: there is nothing of that name to show.
    """

    def __init__(self, cluster: Cluster, names: Sequence[str], *, gradients: bool = False) -> None:
        self._cluster = cluster
        self._question = LayoutRequest(cluster.state, names, gradients=gradients)
        self.view = ShardsView(", ".join(names), *self._question.send())
        self._asking = threading.Lock()
        self._pace = Pace(_EVERY_S)
        self._is_stale = False
        """Whether the saved picture is older than what is shown."""
        self._closed = threading.Event()
        self._saved: DisplayHandle | None = None
        self._shell: InteractiveShell | None = None

    def open(self, shell: InteractiveShell) -> None:
        """Show it in the running cell, and follow the cluster from now on."""
        display(self.view)
        self._saved = display(self._folded(), raw=True, display_id=True)
        self._shell = shell
        shell.events.register("post_run_cell", self._after_cell)
        threading.Thread(target=self._follow, name="axon_nb-shards", daemon=True).start()

    def close(self) -> None:
        """Follow no more; what is shown stays."""
        self._closed.set()
        if self._shell is not None:
            self._shell.events.unregister("post_run_cell", self._after_cell)
            self._shell = None

    def update(self) -> None:
        """Ask the ranks. What cannot be asked any more stays as it is."""
        try:
            with self._asking:
                began = time.thread_time()
                told = self._question.send()
                is_other = self._question.has_changed and self.view.show(*told)
                self._pace.took(self._question.cost_s + time.thread_time() - began)
                self._is_stale |= is_other
        except Exception:  # a view must not disturb the cell that it shows
            _log.debug("a panel could not be updated", exc_info=True)

    def _after_cell(self, result: Any) -> None:
        if not self._cluster.running:
            self.close()
            return
        try:
            self.update()
            if self._is_stale and self._saved is not None:
                self._is_stale = False
                self._saved.update(self._folded(), raw=True)
        except Exception:  # a view is never worth a cell
            _log.warning("The saved picture of a panel could not be made anew.", exc_info=True)

    def _follow(self) -> None:
        while not self._closed.wait(self._pace.wait_s):
            if self.view.watched and self._cluster.busy:
                self.update()

    def _folded(self) -> dict[str, str]:
        bundle = self.view.to_bundle()
        summary = "the same as a picture, which stays in the saved notebook"
        return {**bundle, "text/html": f"<details><summary>{summary}</summary>{bundle['text/html']}</details>"}
