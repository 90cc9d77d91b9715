"""Numbers in displays: tiny and huge models get readable units."""

from __future__ import annotations

import re

import pytest

from axon_nb.plan.display import format_flops, format_ms, paint_of, unit_for
from axon_nb.plan.footprint.plan import MemoryParts, MemoryPlan, RankMemory
from axon_nb.plan.layout_search.plan import Candidate, SearchPlan
from axon_nb.records.colors import KINDS, ROLES

KIB, MIB, GIB = 1024, 1024**2, 1024**3


def _plan(scale: int) -> MemoryPlan:
    held = MemoryParts(parameters=2 * scale, gradients=2 * scale, optimizer=4 * scale)
    peak = MemoryParts(parameters=2 * scale, gradients=2 * scale, optimizer=4 * scale, activations=scale // 2, other=1)
    rank = RankMemory(0, {"dp": 0}, held, peak, "forward", "block1")
    return MemoryPlan("Net", 7, {"dp": 2}, "full_shard", "cuda", "simulated", (rank,))


@pytest.mark.parametrize(
    ("sizes", "name"),
    [
        ((), "bytes"),
        ((0,), "bytes"),
        ((1023,), "bytes"),
        ((3, KIB), "KiB"),
        ((MIB - 1,), "KiB"),
        ((GIB - 1, 5), "MiB"),
        ((GIB,), "GiB"),
        ((5000 * GIB,), "GiB"),
    ],
)
def test_largest_number_decides_the_unit(sizes: tuple[int, ...], name: str) -> None:
    assert unit_for(sizes).name == name


def test_numbers_in_a_unit() -> None:
    gib = unit_for([GIB])
    assert [gib.text(size) for size in (0, 1, GIB // 2, 1234 * GIB)] == ["0", "<0.001", "0.500", "1,234.000"]
    assert gib.text(GIB // 1000, decimals=2) == "<0.01"
    assert unit_for([12]).text(12) == "12"


@pytest.mark.parametrize(
    ("scale", "unit", "total", "least"),
    [(8, "bytes", "69", "1"), (KIB, "KiB", "8.501", "0.001"), (MIB, "MiB", "8.500", "<0.001"),
     (300 * GIB, "GiB", "2,550.000", "<0.001")],
)  # fmt: skip
def test_memory_plan_uses_one_unit(scale: int, unit: str, total: str, least: str) -> None:
    plan = _plan(scale)
    text = str(plan)
    rows = {line.split("  ")[0]: line.split()[-1] for line in text.splitlines()}
    assert f"peak, {unit}" in text
    assert (rows["total"], rows["other"]) == (total, least)
    for shown in (text, plan._repr_mimebundle_()["text/html"]):
        assert not re.search(r"\d[eE][+-]?\d", shown)
        assert "Rank 0; its peak is in forward of block1" in shown
    assert f"<td>{total}</td>" in plan._repr_mimebundle_()["text/html"]
    figure = plan.figure()
    assert figure.layout.yaxis.title.text == unit
    assert sum(bar.y[1] for bar in figure.data) == pytest.approx(plan.peak_bytes / unit_for([plan.peak_bytes]).bytes)
    assert plan.to_frame()["total_gib"].max() == plan.peak_bytes / GIB


def test_layout_search_of_a_tiny_model() -> None:
    one = Candidate(2, 1, 1, "ddp", step_s=2e-9, memory={"model states": 3 * KIB})
    found = SearchPlan("2 GPUs of 80 GiB", (one, Candidate(1, 2, 1, reason="tp shards no layer of this model")))
    assert "memory, KiB" in str(found)
    assert "3.00" in str(found)
    assert "<0.0001" in str(found)
    assert found.figure().layout.xaxis.title.text == "KiB on the fullest rank"
    assert found.figure().data[0].x == (3.0,)


def test_search_figure_marks_the_limit_and_misfits() -> None:
    small = Candidate(2, 1, 1, "ddp", step_s=2e-3, memory={"model states": 3 * GIB})
    large = Candidate(1, 1, 1, "ddp", step_s=1e-3, memory={"model states": 9 * GIB}, reason="needs 9 GiB")
    figure = SearchPlan("2 GPUs of 4 GiB", (small, large), limit_bytes=4 * GIB).figure()
    assert [shape.x0 for shape in figure.layout.shapes] == [4.0]
    assert [note.text for note in figure.layout.annotations] == ["4.00 GiB per rank"]
    assert len({trace.marker.symbol for trace in figure.data}) == 2


def test_figures_have_the_colors_of_the_views() -> None:
    by_part = {bar.name: bar.marker.color for bar in _plan(MIB).figure().data}
    assert by_part["optimizer states"] == ROLES["optimizer"].both
    assert by_part["activations"] == ROLES["activations"].both
    parts = {"compute, forward": 1.0, "compute, backward": 2.0, "communication, forward": 0.5, "bubble and messages": 1}
    work = {name: paint_of(name) for name in parts}
    assert work["compute, forward"] == KINDS["forward"].both
    assert work["compute, backward"] == KINDS["backward"].both
    assert len(set(work.values())) == len(parts)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0"), (1e-9, "<0.0001"), (3.4e-6, "0.0034"), (1e-4, "0.1"), (0.0123456, "12.35"), (12.3456, "12,346")],
)
def test_milliseconds(seconds: float, text: str) -> None:
    assert format_ms(seconds) == text


@pytest.mark.parametrize(
    ("per_s", "text"),
    [(0, "0 MFLOP/s"), (1.5e6, "1.5 MFLOP/s"), (12.34e9, "12.3 GFLOP/s"), (515e12, "515 TFLOP/s"),
     (9.9e15, "9,900 TFLOP/s")],
)  # fmt: skip
def test_floating_point_operations(per_s: float, text: str) -> None:
    assert format_flops(per_s) == text
