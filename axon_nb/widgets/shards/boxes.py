"""Where the parts of a tensor are drawn: boxes to the shape of the tensor, coloured by rank, with words for each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from axon_nb.records.ranks import format_ranks, name_ranks
from axon_nb.records.units import format_bytes
from axon_nb.widgets.palette import OKABE_ITO, contrast
from axon_nb.widgets.shards.tensors import Part, PlacedTensor

__all__ = ["Box", "Drawing", "boxes_in_words", "draw", "drawing_svg", "rank_color", "text_color"]

_COLORS = ("green", "blue", "vermillion", "purple")
_PATTERNS = ("", "hatch", "dots", "grid")
_LONG, _SHORT = 150.0, 18.0
_AREA = 3000.0
"""About so many square units a picture has; its sides stay between `_SHORT` and `_LONG`."""
_CHAR = 6.2
_DEFS = {
    "hatch": '<path d="M-2 2l4-4M0 8l8-8M6 10l4-4" stroke="#fff" stroke-opacity=".55" stroke-width="1.5"/>',
    "dots": '<circle cx="2" cy="2" r="1.2" fill="#fff" fill-opacity=".7"/>'
    '<circle cx="6" cy="6" r="1.2" fill="#fff" fill-opacity=".7"/>',
    "grid": '<path d="M0 0h8M0 0v8" stroke="#fff" stroke-opacity=".6" stroke-width="1.5"/>',
}


@dataclass(frozen=True, slots=True)
class Box:
    """One part as a rectangle, in units of the drawing."""

    x: float
    y: float
    width: float
    height: float
    color: str
    pattern: str
    label: str
    """Ranks, when there is room for them."""
    words: str
    """What it is, for a pointer, a reader, or a table."""


@dataclass(frozen=True, slots=True)
class Drawing:
    """A tensor as boxes."""

    width: float
    height: float
    boxes: tuple[Box, ...]
    empty: str
    """Which ranks hold nothing of it, in words; empty: all have a part."""


def rank_color(rank: int) -> tuple[str, str]:
    """Colour and pattern of a rank: all sixteen of the first ranks differ."""
    return OKABE_ITO[_COLORS[rank % len(_COLORS)]], _PATTERNS[rank // len(_COLORS) % len(_PATTERNS)]


def text_color(color: str) -> str:
    """Black or white, whichever is easier to read on a colour."""
    return max("#000000", "#FFFFFF", key=lambda text: contrast(text, color))


def draw(tensor: PlacedTensor) -> Drawing:
    """The boxes of a tensor: dim 0 from top to bottom, another one from left to right; a vector lies on its side."""
    vertical, horizontal = _shown_dims(tensor)
    rows = tensor.shape[vertical] if vertical is not None else 1
    columns = tensor.shape[horizontal] if horizontal is not None else 1
    width, height = _size(rows, columns)
    parts = [part for part in tensor.parts if not part.is_empty]
    own = tensor.kind == "own" and len(tensor.ranks) > 1
    boxes = []
    for number, part in enumerate(parts):
        y, tall = _stretch(part, vertical, rows, height)
        x, wide = _stretch(part, horizontal, columns, width)
        if own:  # each rank has a tensor of its own: copies beside one another, cut into strips
            x, wide = width * number / len(parts), width / len(parts)
        boxes.append(_box(tensor, part, (x, y, wide, tall)))
    nothing = [rank for part in tensor.parts if part.is_empty for rank in part.ranks]
    empty = f"{name_ranks(nothing)}: nothing" if nothing else ""
    return Drawing(width, height, tuple(boxes), empty)


def _shown_dims(tensor: PlacedTensor) -> tuple[int | None, int | None]:
    count = len(tensor.shape)
    if count == 0:
        return None, None
    if count == 1:
        return None, 0
    split = [int(place[6:-1]) for place in tensor.placements if place.startswith("Shard")]
    horizontal = next((dim for dim in split if dim > 0), 1 if count == 2 else count - 1)
    vertical = next((dim for dim in split if dim != horizontal), 0)
    return vertical, horizontal


def _size(rows: int, columns: int) -> tuple[float, float]:
    ratio = min(8.0, max(1 / 2, max(1, columns) / max(1, rows)))
    width = (_AREA * ratio) ** 0.5
    return round(min(_LONG, max(_SHORT, width)), 1), round(min(_LONG, max(_SHORT, _AREA / width)), 1)


def _stretch(part: Part, dim: int | None, extent: int, length: float) -> tuple[float, float]:
    if dim is None:
        return 0.0, length
    return length * part.offset[dim] / max(1, extent), length * part.shape[dim] / max(1, extent)


def _box(tensor: PlacedTensor, part: Part, area: tuple[float, float, float, float]) -> Box:
    x, y, width, height = (round(number, 2) for number in area)
    label = format_ranks(part.ranks)
    everywhere = len(part.ranks) > 1 and part.shape == tensor.shape
    color, pattern = (OKABE_ITO["grey"], "") if everywhere else rank_color(part.ranks[0])
    fits = len(label) * _CHAR + 2 <= width and height >= 10
    words = _words(tensor, part)
    return Box(
        round(x, 2), round(y, 2), round(width, 2), round(height, 2), color, pattern, label if fits else "", words
    )


def _words(tensor: PlacedTensor, part: Part) -> str:
    ranks = name_ranks(part.ranks)
    where = ", ".join(
        f"{start}:{start + size}" if size != whole else ":"
        for start, size, whole in zip(part.offset, part.shape, tensor.shape, strict=True)
    )
    shape = " × ".join(map(str, part.shape)) or "a number"
    padded = f" ({format_bytes(part.padding)} of it padding)" if part.padding else ""
    each = " each" if len(part.ranks) > 1 else ""
    region = f"[{where}], " if tensor.shape else ""
    return f"{ranks}: {region}{shape}, {format_bytes(part.bytes)}{each}{padded}, {part.device}"


def drawing_svg(drawing: Drawing) -> str:
    """The drawing as a picture of its own, which looks right on light and dark pages."""
    used = {box.pattern for box in drawing.boxes if box.pattern}
    patterns = "".join(
        f'<pattern id="{name}" width="8" height="8" patternUnits="userSpaceOnUse">{lines}</pattern>'
        for name, lines in _DEFS.items()
        if name in used
    )
    size = f'width="{drawing.width + 2:g}" height="{drawing.height + 2:g}"'
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} viewBox="-1 -1 {drawing.width + 2:g} {drawing.height + 2:g}">'
        f"{f'<defs>{patterns}</defs>' if patterns else ''}{''.join(map(_box_svg, drawing.boxes))}"
        f'<rect width="{drawing.width:g}" height="{drawing.height:g}" fill="none" stroke="#767676"/></svg>'
    )


def _box_svg(box: Box) -> str:
    place = f'x="{box.x:g}" y="{box.y:g}" width="{box.width:g}" height="{box.height:g}"'
    shapes = [f'<rect {place} fill="{box.color}" stroke="#767676" stroke-width=".75"/>']
    if box.pattern:
        shapes.append(f'<rect {place} fill="url(#{box.pattern})"/>')
    if box.label:
        middle = f'x="{box.x + box.width / 2:g}" y="{box.y + box.height / 2 + 3.5:g}"'
        halo = f' paint-order="stroke" stroke="{box.color}" stroke-width="3"' if box.pattern else ""
        shapes.append(
            f'<text {middle} text-anchor="middle" font-family="sans-serif" font-size="10" '
            f'fill="{text_color(box.color)}"{halo}>{escape(box.label)}</text>'
        )
    return "".join(shapes)


def boxes_in_words(drawing: Drawing) -> Sequence[str]:
    """One line a part, and what is not there."""
    return [*(box.words for box in drawing.boxes), *([drawing.empty] if drawing.empty else [])]
