"""Shards, drawn and as text: every element of a tensor is in as many boxes as ranks hold it."""

from __future__ import annotations

from html.parser import HTMLParser

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from axon_nb.records.colors import RANKS
from axon_nb.records.telemetry import Shard
from axon_nb.widgets.shards import (
    ShardsView,
    bytes_by_rank,
    describe_placement,
    draw,
    drawing_svg,
    find_mesh,
    fold,
    merge_shards,
    shards_bundle,
)
from tests.support.records.shard_records import split


@given(
    st.tuples(st.integers(1, 9), st.integers(1, 9)),
    st.tuples(st.integers(1, 4), st.integers(1, 3)),
    st.tuples(st.sampled_from([None, 0, 1]), st.sampled_from([None, 0, 1])),
)
def test_boxes_cover_the_tensor_once(
    shape: tuple[int, int], mesh: tuple[int, int], dims: tuple[int | None, int | None]
) -> None:
    (tensor,) = merge_shards(split(shape, mesh, dims))
    drawing = draw(tensor)
    assert tensor.ranks == tuple(range(mesh[0] * mesh[1]))
    assert sum(box.width * box.height for box in drawing.boxes) == pytest.approx(
        drawing.width * drawing.height, rel=0.01
    )
    for box in drawing.boxes:
        assert box.x >= 0
        assert box.y >= 0
        assert box.x + box.width <= drawing.width + 0.02
        assert box.y + box.height <= drawing.height + 0.02
    held = sum(len(part.ranks) * part.shape[0] * part.shape[1] for part in tensor.parts)
    assert tensor.bytes == 4 * held
    assert sum(bytes_by_rank([tensor]).values()) == tensor.bytes


def test_kinds_are_distinguished_in_text() -> None:
    def words(*args: object, **change: object) -> str:
        (tensor,) = merge_shards(split(*args))  # type: ignore[arg-type]
        return describe_placement(tensor)

    assert words((8, 6), (4,), (0,)) == "rows over dp (4)"
    assert words((8,), (4,), (0,)) == "elements over dp (4)"
    assert words((8, 6), (2, 2), (None, 1)) == "copies over dp (2), columns over tp (2)"
    assert words((8, 6, 5), (2,), (2,)) == "dim 2 over dp (2)"
    unnamed = [replace(shard, axes=("axis 0",)) for shard in split((8, 6), (4,), (0,))]
    assert describe_placement(merge_shards(unnamed)[0]) == "rows over 4 ranks"
    assert find_mesh(unnamed).title == "mesh: 4 ranks"
    plain = [Shard("x", "tensor", rank, (3,), (3,), (0,), (), "float32", "cpu", 12) for rank in (0, 1)]
    assert describe_placement(merge_shards(plain)[0]) == "whole on each of ranks 0-1, not declared"
    assert merge_shards(plain)[0].kind == "own"
    summand = [
        Shard("x", "tensor", r, (3,), (3,), (0,), ("Partial(sum)",), "float32", "cpu", 12, 0, ("dp",), (2,), (r,))
        for r in (0, 1)
    ]
    assert describe_placement(merge_shards(summand)[0]) == "partial sums over dp (2)"
    padded = [
        Shard(
            "x", "tensor", r, (3,), (2 - r,), (2 * r,), ("Shard(0)",), "float32", "cpu", 8, 4 * r, ("dp",), (2,), (r,)
        )
        for r in (0, 1)
    ]
    assert describe_placement(merge_shards(padded)[0]) == "elements over dp (2); 4 B of padding"


def test_rank_without_shards_is_reported() -> None:
    (tensor,) = merge_shards(split((6, 10), (4,), (0,)))
    drawing = draw(tensor)
    assert len(drawing.boxes) == 3
    assert drawing.empty == "rank 3: nothing"
    assert drawing.boxes[2].text == "rank 2: [4:6, :], 2 × 10, 80 B, cpu"


def test_tensors_of_some_ranks_are_listed_with_the_others() -> None:
    stage0, stage1 = split((4, 4), (1,), (None,), "a"), split((4, 4), (1,), (None,), "b")
    moved = [Shard("b", "parameter", 1, (4, 4), (4, 4), (0, 0), (), "float32", "cpu", 64) for _ in stage1]
    tensors = merge_shards([*moved, *stage0])
    assert [(tensor.name, tensor.ranks) for tensor in tensors] == [("a", (0,)), ("b", (1,))]
    assert describe_placement(tensors[1]) == "rank 1 alone"


def test_shard_has_its_first_ranks_colour_and_replicas_none() -> None:
    (cut,) = merge_shards(split((16, 6), (8,), (0,)))
    assert [box.rank for box in draw(cut).boxes] == list(range(8))
    assert [RANKS[rank].both in drawing_svg(draw(cut)) for rank in range(8)] == [True] * 8
    (copied,) = merge_shards(split((16, 6), (8,), (None,)))
    assert [box.rank for box in draw(copied).boxes] == [-1]


def blocks(count: int, odd: int = -1) -> list[Shard]:
    """Two tensors of each block; one block is split along another dim."""
    return [
        shard
        for block in range(count)
        for name, dim in (("norm.weight", 0), ("up.weight", 1 if block == odd else 0))
        for shard in split((8, 6), (2,), (dim,), f"blocks.{block}.{name}")
    ]


def test_tensors_of_equal_blocks_share_a_row() -> None:
    folded = fold(merge_shards([*split((8, 6), (2,), (0,), "head.weight"), *blocks(12, odd=5)]))
    assert [(row.name, len(row.tensors)) for row in folded] == [
        ("head.weight", 1),
        ("blocks.0-11.norm.weight", 12),
        ("blocks.0-4,6-11.up.weight", 11),
        ("blocks.5.up.weight", 1),
    ]


def test_saved_page_has_a_row_per_difference() -> None:
    tensors = merge_shards(blocks(138))
    assert len(tensors) == 276
    bundle = shards_bundle("model", tensors)
    assert bundle["text/html"].count("<tr") == 3, "a head and two rows"
    assert "blocks.0-137.up.weight (138 alike)" in bundle["text/html"]
    assert "blocks.0-137.up.weight (138 alike)" in bundle["text/plain"]
    assert bundle["text/plain"].startswith("model: 276 tensors on 2 ranks")


def test_bundle_needs_no_script_and_escapes_names() -> None:
    tensors = merge_shards(split((8, 6), (4,), (0,), "<b>&"))
    bundle = shards_bundle("model", tensors, ["One <note>."])
    assert "&lt;b&gt;&amp;" in bundle["text/html"]
    assert "One &lt;note&gt;." in bundle["text/html"]
    assert "<script" not in bundle["text/html"]
    assert bundle["text/plain"].startswith("model: 1 tensor on 4 ranks, 192 B in all, 48 B on each")
    HTMLParser().feed(bundle["text/html"])
    assert "<svg" in drawing_svg(draw(tensors[0]))


def test_equal_tensors_share_a_drawing_and_updates_are_marked() -> None:
    shards = [shard for name in ("a", "b", "c") for shard in split((8, 6), (4,), (0,), name)]
    view = ShardsView("model", shards)
    assert len(view.content["drawings"]) == 1
    assert [tensor["drawing"] for tensor in view.content["tensors"]] == [0, 0, 0]
    assert view.show(shards) is False
    assert view.show(split((8, 6), (4,), (None,), "a")) is True
    view.refresh(unseen=True)
    assert view.content["updates"] == 1
    assert len(view.content["tensors"]) == 1
    assert view.watched is False
    view.close()


def test_mesh_places_every_rank_by_its_coordinates() -> None:
    mesh = find_mesh([*split((8, 8), (2, 4), (0, 1)), *split((8,), (8,), (0,), "bias")])
    assert (mesh.title, mesh.columns, mesh.ranks) == ("mesh: dp 2 × tp 4", 4, tuple(range(8)))
    assert mesh.places[6] == "dp 1, tp 2"
    turned = [replace(shard, rank=7 - shard.rank) for shard in split((8, 8), (2, 4), (0, 1))]
    assert find_mesh(turned).ranks == tuple(range(7, -1, -1))


def test_ranks_are_in_order_without_a_full_mesh() -> None:
    plain = [replace(shard, axes=(), mesh_shape=(), coordinates=()) for shard in split((600,), (300,), (0,))]
    mesh = find_mesh(plain)
    assert (mesh.title, mesh.columns, mesh.ranks[:2], set(mesh.places)) == ("ranks", 18, (0, 1), {""})


def test_number_is_drawn_smaller_than_any_matrix() -> None:
    (number,) = merge_shards([Shard("step", "optimizer", rank, (), (), (), (), "float32", "cpu", 4) for rank in (0, 1)])
    (matrix,) = merge_shards([Shard("x", "parameter", 0, (2, 2), (2, 2), (0, 0), (), "float32", "cpu", 16)])
    assert draw(number).width < draw(matrix).width / 2
    assert [box.ranks for box in draw(number).boxes] == [(0, 1)]
