"""A mesh as slices and as JSON."""

from __future__ import annotations

from axon_nb.records.protocol.wire import decode
from axon_nb.records.telemetry import MeshInfo, MeshSlice


def test_three_axes_are_slices_of_two() -> None:
    mesh = decode(MeshInfo, {"name": "mesh", "axes": ["pp", "dp", "tp"], "shape": [2, 2, 3], "ranks": list(range(12))})
    assert str(mesh) == "mesh: pp 2 × dp 2 × tp 3"
    assert mesh.slices() == [
        MeshSlice("pp 0", ((0, 1, 2), (3, 4, 5))),
        MeshSlice("pp 1", ((6, 7, 8), (9, 10, 11))),
    ]


def test_four_axes_name_both_outer_ones() -> None:
    mesh = MeshInfo("grid", ("a", "b", "c", "d"), (2, 3, 1, 1), tuple(range(6)))
    assert str(MeshInfo("grid", ("a",), (2,), (0, 1))) == "mesh grid: a 2"
    assert [part.place for part in mesh.slices()] == [f"a {a}, b {b}" for a in range(2) for b in range(3)]


def test_one_axis_is_a_row() -> None:
    assert MeshInfo("mesh", ("dp",), (3,), (2, 0, 1)).slices() == [MeshSlice("", ((2, 0, 1),))]
