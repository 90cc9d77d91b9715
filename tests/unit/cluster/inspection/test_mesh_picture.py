"""The mesh on the cluster's card."""

from __future__ import annotations

from msgspec.structs import replace

from axon_nb.cluster.inspection.status import cluster_card
from axon_nb.records.telemetry import ClusterInfo, MeshInfo, RankInfo

RANKS = tuple(RankInfo(rank, "h", 100 + rank, "cpu", "gloo", "idle", 2**20, 0, None) for rank in range(4))
MESH = MeshInfo("mesh", ("dp", "<tp>"), (2, 2), (0, 1, 2, 3))
INFO = ClusterInfo("default", "gloo", "h", 4, True, "axon", RANKS, MESH)


def test_text_has_one_line_per_row() -> None:
    lines = cluster_card(INFO)["text/plain"].splitlines()
    assert lines[-3:] == ["mesh: dp 2 × <tp> 2", "  dp 0: 0 1", "  dp 1: 2 3"]


def test_html_has_axes_ranks_and_activities() -> None:
    html = cluster_card(INFO)["text/html"]
    assert "mesh: dp 2 × &lt;tp&gt; 2" in html
    assert '<th scope="col" style="' in html
    assert "&lt;tp&gt; 1</th>" in html
    assert 'title="rank 3: idle"' in html
    assert "line-through" not in html


def test_lost_rank_is_struck_out() -> None:
    dead = replace(RANKS[2], state="was killed by SIGKILL", rss_bytes=0)
    html = cluster_card(replace(INFO, ranks=(*RANKS[:2], dead, RANKS[3])))["text/html"]
    assert html.count("line-through") == 1
    assert 'title="rank 2: gone"' in html


def test_large_meshes_are_shown_as_text_only() -> None:
    large = MeshInfo("mesh", ("dp", "tp"), (512, 8), tuple(range(4096)))
    card = cluster_card(replace(INFO, mesh=large))
    assert "dp 512 × tp 8" in card["text/html"]
    assert len(card["text/html"]) < 20_000
