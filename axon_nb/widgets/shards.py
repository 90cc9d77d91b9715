"""`%shards`: which rank holds which part of which tensor, live while cells run.

Tensors are merged from their parts on all ranks and drawn as boxes in proportion to their shape, coloured by rank. The
saved page has pictures and a table, which need neither a kernel nor scripts.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any, Literal

from msgspec import Struct, to_builtins

from axon_nb.cluster.cluster import Cluster
from axon_nb.cluster.inspection.variables import LayoutRequest
from axon_nb.records.colors import INK, KINDS, RANKS
from axon_nb.records.ranks import format_ranks, name_ranks
from axon_nb.records.telemetry import Shard
from axon_nb.records.units import aligned, format_bytes
from axon_nb.widgets import html
from axon_nb.widgets.assets import script, style
from axon_nb.widgets.panel import LivePanel, LiveView

Kind = Literal["sharded", "replicated", "partial", "own"]
_DIM_NAMES = {1: {0: "elements"}, 2: {0: "rows", 1: "columns"}}
"""Names of the dims of vectors and matrices, by the number of dims."""
_NUMBER = re.compile(r"(?<![A-Za-z0-9])\d+(?![A-Za-z0-9])|(?<=[A-Za-z])\d+(?=\.|$)")
"""A number that is a part of a name, or ends one: `blocks.12.up`, `block12.up`."""
_MAX_COLUMNS = 32
"""Of a grid without axes."""
_MAX_SIDE, _MIN_SIDE, _NUMBER_SIDE = 150.0, 18.0, 12.0
_AREA = 3000.0
"""Approximate area of a drawing in square units; its sides stay between `_MIN_SIDE` and `_MAX_SIDE`."""
_CHAR_WIDTH = 6.2
_PALE = 0.55
"""Opacity of the colours in every second group of eight ranks."""
_TITLES = ("tensor", "parts by rank")
UNNAMED = "axis 0"
"""The first axis of a mesh without names."""
_MAX_ROWS = 60
_MAX_TENSORS = 2000
_MIN_INTERVAL_S = 2.0


class Part(Struct, frozen=True):
    """One region of a tensor, and the ranks that hold it."""

    ranks: tuple[int, ...]
    offset: tuple[int, ...]
    shape: tuple[int, ...]
    bytes: int
    """On each of these ranks, padding included."""
    padding: int
    device: str

    @property
    def is_empty(self) -> bool:
        """Whether it has no elements."""
        return 0 in self.shape


class PlacedTensor(Struct, frozen=True):
    """A tensor and where its parts are."""

    name: str
    role: str
    shape: tuple[int, ...]
    dtype: str
    placements: tuple[str, ...]
    axes: tuple[str, ...]
    mesh_shape: tuple[int, ...]
    gathered: bool
    parts: tuple[Part, ...]
    """In the order of their lowest ranks."""

    @property
    def kind(self) -> Kind:
        """Summary of the placements; ``own``: each rank has an independent tensor of that name."""
        if not self.placements:
            return "own"
        if any(placement.startswith("Partial") for placement in self.placements):
            return "partial"
        return "sharded" if any(placement.startswith("Shard") for placement in self.placements) else "replicated"

    @property
    def bytes(self) -> int:
        """Bytes on all ranks together."""
        return sum(part.bytes * len(part.ranks) for part in self.parts)

    @property
    def padding(self) -> int:
        """Bytes of padding on all ranks together."""
        return sum(part.padding * len(part.ranks) for part in self.parts)

    @property
    def ranks(self) -> tuple[int, ...]:
        """Ranks that have the tensor, including those with an empty part."""
        return tuple(sorted(rank for part in self.parts for rank in part.ranks))


def merge_shards(shards: Iterable[Shard]) -> list[PlacedTensor]:
    """Return the tensors in the order of the lowest rank; those that only other ranks have come last."""
    groups: dict[tuple[str, str, tuple[int, ...], str], list[Shard]] = {}
    for shard in sorted(shards, key=lambda shard: shard.rank):
        groups.setdefault((shard.role, shard.name, shard.global_shape, shard.dtype), []).append(shard)
    return [_merge(group) for group in groups.values()]


def _merge(shards: Sequence[Shard]) -> PlacedTensor:
    first = shards[0]
    regions: dict[tuple[object, ...], list[Shard]] = {}
    for shard in shards:
        key = (shard.offset, shard.local_shape, shard.bytes, shard.device)
        regions.setdefault(key, []).append(shard)
    parts = tuple(
        Part(tuple(s.rank for s in same), one.offset, one.local_shape, one.bytes, one.padding, one.device)
        for one, same in ((same[0], same) for same in regions.values())
    )
    return PlacedTensor(
        first.name, first.role, first.global_shape, first.dtype, first.placements, first.axes, first.mesh_shape,
        first.gathered, parts,
    )  # fmt: skip


def bytes_by_rank(tensors: Iterable[PlacedTensor]) -> dict[int, int]:
    """Return the bytes that each rank holds of all tensors."""
    total: dict[int, int] = {}
    for tensor in tensors:
        for part in tensor.parts:
            for rank in part.ranks:
                total[rank] = total.get(rank, 0) + part.bytes
    return dict(sorted(total.items()))


def ranks_by_bytes(bytes_by_rank: Mapping[int, int]) -> list[tuple[int, list[int]]]:
    """Return the ranks that hold the same number of bytes, for each of these numbers."""
    groups: dict[int, list[int]] = {}
    for rank, size in bytes_by_rank.items():
        groups.setdefault(size, []).append(rank)
    return list(groups.items())


def describe_placement(tensor: PlacedTensor) -> str:
    """Describe where a tensor's parts are, such as ``rows over dp (4)`` or ``copies over dp (2)``."""
    ranks = name_ranks(tensor.ranks)
    if tensor.kind == "own":
        return f"whole on each of {ranks}, not declared" if len(tensor.ranks) > 1 else f"{ranks} alone"
    parts = []
    for placement, axis, count in zip(tensor.placements, tensor.axes, tensor.mesh_shape, strict=True):
        over = f"{count} ranks" if axis == UNNAMED and len(tensor.axes) == 1 else f"{axis} ({count})"
        if placement.startswith("Shard"):
            dim = int(placement[6:-1])
            parts.append(f"{_DIM_NAMES.get(len(tensor.shape), {}).get(dim, f'dim {dim}')} over {over}")
        elif placement.startswith("Partial"):
            parts.append(f"partial sums over {over}" if "sum" in placement else f"{placement} over {over}")
        elif count > 1:
            parts.append(f"copies over {over}")
    text = ", ".join(parts) or ranks
    if tensor.gathered:
        text += "; gathered for now, sharded at rest"
    if tensor.padding:
        text += f"; {format_bytes(tensor.padding)} of padding"
    return text


class Alike(Struct, frozen=True):
    """Tensors that differ by one number in their names only."""

    name: str
    """With the numbers of all, such as ``blocks.0-16,18-31.norm.weight``."""
    tensors: tuple[PlacedTensor, ...]

    @property
    def first(self) -> PlacedTensor:
        """One of them, which shows what all are like."""
        return self.tensors[0]


def fold(tensors: Iterable[PlacedTensor]) -> list[Alike]:
    """Return the tensors in order, with those that are alike together, where the first of them is.

    They are alike if their shapes, placements and parts are equal, and their names but for the first number.
    """
    groups: dict[object, list[PlacedTensor]] = {}
    for tensor in tensors:
        pattern = _NUMBER.sub("{}", tensor.name, count=1)
        key = (pattern, tensor.role, tensor.shape, tensor.dtype, tensor.placements, tensor.axes, tensor.parts)
        groups.setdefault((*key, tensor.gathered), []).append(tensor)
    return [Alike(_folded_name(group), tuple(group)) for group in groups.values()]


def _folded_name(group: Sequence[PlacedTensor]) -> str:
    name = group[0].name
    match = _NUMBER.search(name)
    if len(group) == 1 or match is None:
        return name
    numbers = sorted(int(number[0]) for tensor in group if (number := _NUMBER.search(tensor.name)))
    return f"{name[: match.start()]}{format_ranks(numbers)}{name[match.end() :]}"


class Mesh(Struct, frozen=True):
    """Ranks row by row; the last axis goes from left to right."""

    title: str
    """Text such as ``mesh: dp 2 × tp 4``, or ``ranks`` if no mesh has all of them."""
    columns: int
    ranks: tuple[int, ...]
    places: tuple[str, ...]
    """Coordinates of each, such as ``dp 0, tp 3``; empty without a mesh."""


def find_mesh(shards: Sequence[Shard]) -> Mesh:
    """Return the mesh with most axes that places every rank; if there is none, the ranks in order."""
    ranks = sorted({shard.rank for shard in shards})
    known: dict[tuple[tuple[str, ...], tuple[int, ...]], dict[int, tuple[int, ...]]] = {}
    uses: Counter[tuple[tuple[str, ...], tuple[int, ...]]] = Counter()
    for shard in shards:
        if shard.axes and math.prod(shard.mesh_shape) == len(ranks):
            key = (shard.axes, shard.mesh_shape)
            known.setdefault(key, {})[shard.rank] = shard.coordinates
            uses[key] += 1
    whole = [key for key, places in known.items() if len(set(places.values())) == len(places) == len(ranks)]
    if not whole:
        columns = len(ranks) if len(ranks) <= _MAX_COLUMNS // 2 else min(_MAX_COLUMNS, math.isqrt(len(ranks) - 1) + 1)
        return Mesh("ranks", max(1, columns), tuple(ranks), ("",) * len(ranks))
    axes, shape = best = max(whole, key=lambda key: (len(key[0]), uses[key]))
    places = known[best]
    ordered = sorted(ranks, key=places.__getitem__)
    names = [", ".join(f"{axis} {at}" for axis, at in zip(axes, places[rank], strict=True)) for rank in ordered]
    columns = shape[-1] if len(shape) > 1 else min(shape[0], _MAX_COLUMNS)
    return Mesh(f"mesh: {_sizes(axes, shape)}", columns, tuple(ordered), tuple(names))


def _sizes(axes: Sequence[str], shape: Sequence[int]) -> str:
    if tuple(axes) == (UNNAMED,):
        return f"{shape[0]} ranks"
    return " × ".join(f"{axis} {size}" for axis, size in zip(axes, shape, strict=True))


class Box(Struct, frozen=True):
    """One part as a rectangle, in units of the drawing."""

    x: float
    y: float
    width: float
    height: float
    rank: int
    """The first one that holds it; -1: all ranks hold a copy."""
    ranks: tuple[int, ...]
    """All that hold it."""
    label: str
    """Ranks, if there is room for them."""
    text: str
    """Description for a tooltip, a screen reader, or a table."""


class Drawing(Struct, frozen=True):
    """A tensor as boxes."""

    width: float
    height: float
    boxes: tuple[Box, ...]
    empty: str
    """Which ranks hold no part of the tensor, such as ``rank 3: nothing``; empty: all have a part."""


def draw(tensor: PlacedTensor) -> Drawing:
    """Draw a tensor: dim 0 from top to bottom, another dim from left to right; a vector from left to right."""
    if not tensor.shape:
        return _draw_number(tensor)
    vertical, horizontal = _shown_dims(tensor)
    rows = tensor.shape[vertical] if vertical is not None else 1
    columns = tensor.shape[horizontal] if horizontal is not None else 1
    width, height = _size(rows, columns)
    parts = [part for part in tensor.parts if not part.is_empty]
    is_independent = tensor.kind == "own" and len(tensor.ranks) > 1
    boxes = []
    for number, part in enumerate(parts):
        y, box_height = _interval(part, vertical, rows, height)
        x, box_width = _interval(part, horizontal, columns, width)
        if is_independent:  # strips side by side
            x, box_width = width * number / len(parts), width / len(parts)
        boxes.append(_box(tensor, part, (x, y, box_width, box_height)))
    without = [rank for part in tensor.parts if part.is_empty for rank in part.ranks]
    empty = f"{name_ranks(without)}: nothing" if without else ""
    return Drawing(width, height, tuple(boxes), empty)


def _draw_number(tensor: PlacedTensor) -> Drawing:
    count = len(tensor.parts) or 1
    boxes = [
        _box(tensor, part, (number * _NUMBER_SIDE / count, 0.0, _NUMBER_SIDE / count, _NUMBER_SIDE))
        for number, part in enumerate(tensor.parts)
    ]
    return Drawing(_NUMBER_SIDE, _NUMBER_SIDE, tuple(boxes), "")


def _shown_dims(tensor: PlacedTensor) -> tuple[int | None, int | None]:
    count = len(tensor.shape)
    if count == 1:
        return None, 0
    sharded = [int(placement[6:-1]) for placement in tensor.placements if placement.startswith("Shard")]
    horizontal = next((dim for dim in sharded if dim > 0), 1 if count == 2 else count - 1)
    vertical = next((dim for dim in sharded if dim != horizontal), 0)
    return vertical, horizontal


def _size(rows: int, columns: int) -> tuple[float, float]:
    ratio = min(8.0, max(1 / 2, max(1, columns) / max(1, rows)))
    width = (_AREA * ratio) ** 0.5
    return _clamp_side(width), _clamp_side(_AREA / width)


def _clamp_side(length: float) -> float:
    return round(min(_MAX_SIDE, max(_MIN_SIDE, length)), 1)


def _interval(part: Part, dim: int | None, size: int, length: float) -> tuple[float, float]:
    """Return the start and length of a part along one side of the drawing."""
    if dim is None:
        return 0.0, length
    return length * part.offset[dim] / max(1, size), length * part.shape[dim] / max(1, size)


def _box(tensor: PlacedTensor, part: Part, area: tuple[float, float, float, float]) -> Box:
    x, y, width, height = (round(number, 2) for number in area)
    label = format_ranks(part.ranks)
    is_replica = len(part.ranks) > 1 and part.shape == tensor.shape
    fits = len(label) * _CHAR_WIDTH + 2 <= width and height >= 10
    rank = -1 if is_replica else part.ranks[0]
    return Box(x, y, width, height, rank, part.ranks, label if fits else "", _describe(tensor, part))


def _describe(tensor: PlacedTensor, part: Part) -> str:
    ranks = name_ranks(part.ranks)
    indices = ", ".join(
        f"{start}:{start + size}" if size != full_size else ":"
        for start, size, full_size in zip(part.offset, part.shape, tensor.shape, strict=True)
    )
    shape = " × ".join(map(str, part.shape)) or "a number"
    padded = f" ({format_bytes(part.padding)} of it padding)" if part.padding else ""
    each = " each" if len(part.ranks) > 1 else ""
    region = f"[{indices}], " if tensor.shape else ""
    return f"{ranks}: {region}{shape}, {format_bytes(part.bytes)}{each}{padded}, {part.device}"


def drawing_svg(drawing: Drawing) -> str:
    """Return the drawing as an SVG that looks right on light and dark pages."""
    size = f'width="{drawing.width + 2:g}" height="{drawing.height + 2:g}"'
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} viewBox="-1 -1 {drawing.width + 2:g} {drawing.height + 2:g}">'
        f"{''.join(map(_box_svg, drawing.boxes))}"
        f'<rect width="{drawing.width:g}" height="{drawing.height:g}" rx="2" fill="none" stroke="{INK}"/></svg>'
    )


def _box_svg(box: Box) -> str:
    gap = 1 if min(box.width, box.height) > 6 else 0
    color = KINDS["other"] if box.rank < 0 else html.rank_color(box.rank)
    opacity = f' fill-opacity="{_PALE}"' if box.rank >= 0 and box.rank // len(RANKS) % 2 else ""
    area = f'x="{box.x:g}" y="{box.y:g}" width="{box.width - gap:g}" height="{box.height - gap:g}"'
    shapes = f'<rect {area} fill="{color.both}"{opacity}/>'
    if not box.label:
        return shapes
    center = f'x="{box.x + box.width / 2:g}" y="{box.y + box.height / 2 + 3.5:g}"'
    return (
        f'{shapes}<text {center} text-anchor="middle" font-family="sans-serif" font-size="10" '
        f'fill="{html.text_color(color.both)}">{escape(box.label)}</text>'
    )


def describe_boxes(drawing: Drawing) -> Sequence[str]:
    """Return one line per part, and one for the ranks without a part."""
    return [*(box.text for box in drawing.boxes), *([drawing.empty] if drawing.empty else [])]


def shown_shape(tensor: PlacedTensor) -> str:
    """Return text such as ``64 × 32 float32``."""
    return f"{' × '.join(map(str, tensor.shape)) or 'scalar'} {tensor.dtype}"


def local_sizes(tensor: PlacedTensor) -> str:
    """Return a tensor's bytes on each rank that has it, such as ``2.00 KiB`` or ``0 B to 80 B``."""
    sizes = {part.bytes for part in tensor.parts}
    low, high = format_bytes(min(sizes, default=0)), format_bytes(max(sizes, default=0))
    return low if low == high else f"{low} to {high}"


def heading(title: str, tensors: Sequence[PlacedTensor]) -> str:
    """Return text such as ``model: 12 tensors on 4 ranks, 1.20 MiB in all, 307 KiB on each rank``."""
    total_bytes = bytes_by_rank(tensors)
    low, high = min(total_bytes.values(), default=0), max(total_bytes.values(), default=0)
    each = f"{format_bytes(low)} on each" if low == high else f"{format_bytes(low)} to {format_bytes(high)} per rank"
    count = f"{len(tensors)} tensor{'' if len(tensors) == 1 else 's'}"
    ranks = f"{len(total_bytes)} rank{'' if len(total_bytes) == 1 else 's'}"
    return f"{title}: {count} on {ranks}, {format_bytes(sum(total_bytes.values()))} in all, {each}"


def shards_bundle(title: str, tensors: Sequence[PlacedTensor], notes: Sequence[str] = ()) -> dict[str, str]:
    """Return the tensors as `text/html` and `text/plain`.

    Args:
        title: What is shown, such as ``model``.
        tensors: The tensors in the order in which they are shown.
        notes: Sentences below.
    """
    rows = fold(tensors)
    num_omitted = sum(len(row.tensors) for row in rows[_MAX_ROWS:])
    omitted = [f"{num_omitted} more tensors are left out here."] if num_omitted else []
    return {
        "text/html": _page_html(title, tensors, rows, [*notes, *omitted]),
        "text/plain": _page_text(title, tensors, rows, notes),
    }


def _page_text(title: str, tensors: Sequence[PlacedTensor], folded: Sequence[Alike], notes: Sequence[str]) -> str:
    rows = [(_shown_name(row), *_page_cells(row.first)) for row in folded]
    return "\n".join([heading(title, tensors), *(f"  {line}" for line in aligned(rows)), *notes])


def _shown_name(row: Alike) -> str:
    return f"{row.name} ({len(row.tensors)} alike)" if len(row.tensors) > 1 else row.name


def _page_cells(tensor: PlacedTensor) -> tuple[str, str, str, str]:
    sizes = local_sizes(tensor)
    is_equal = len({part.bytes for part in tensor.parts}) <= 1
    return tensor.role, shown_shape(tensor), describe_placement(tensor), f"{sizes} each" if is_equal else sizes


def _page_html(title: str, tensors: Sequence[PlacedTensor], folded: Sequence[Alike], notes: Sequence[str]) -> str:
    totals = ranks_by_bytes(bytes_by_rank(tensors))
    total = ", ".join(f"{name_ranks(ranks)}: {format_bytes(size)}" for size, ranks in totals)
    rows = html.table(_TITLES, map(_page_row, folded[:_MAX_ROWS]))
    return html.figure(f"{rows}{html.note_lines([total, *notes])}", heading=heading(title, tensors))


def _page_row(row: Alike) -> str:
    tensor, drawing = row.first, draw(row.first)
    text = escape("; ".join(describe_boxes(drawing)))
    picture = (
        f'<img alt="{text}" title="{text}" src="{html.svg_uri(drawing_svg(drawing))}" width="{drawing.width + 2:g}" '
        f'height="{drawing.height + 2:g}" style="display:block;margin:0;max-width:none">'
    )
    role, shape, where, sizes = map(escape, _page_cells(tensor))
    words = f'<div style="font-weight:400;{html.MUTED}">{role}, {shape}, {sizes}</div>'
    words += f'<div style="font-weight:400">{where}</div>'
    return html.table_row(
        html.row_title(f"{escape(_shown_name(row))}{words}", f"{html.WRAPPED_CELL};overflow-wrap:anywhere"),
        f'<td style="{html.CELL}">{picture}</td>',
    )


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
        rows = [_live_row(tensor, drawings) for tensor in self._tensors]
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


def _live_row(tensor: PlacedTensor, drawings: dict[str, int]) -> dict[str, Any]:
    drawing = to_builtins(draw(tensor))
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
