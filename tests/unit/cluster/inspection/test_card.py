"""The cluster's card, as words and as HTML."""

from __future__ import annotations

import dataclasses

from axon_nb.cluster.inspection.card import cluster_card
from axon_nb.cluster.inspection.status import ClusterStatus
from axon_nb.records.telemetry import ClusterInfo, RankInfo

RANKS = (
    RankInfo(0, "node-1", 4711, "cpu", "gloo", "idle", 300 * 2**20, 0, None),
    RankInfo(1, "node-1", 4712, "cpu", "gloo", "in <all_reduce>", 0, 0, 7),
)
INFO = ClusterInfo("default", "gloo", "node-1", 2, True, "axon", RANKS)


def test_card_as_text() -> None:
    assert cluster_card(INFO)["text/plain"].splitlines() == [
        "default: running, 2 ranks, gloo, on node-1, engines: axon",
        "rank  host     pid  device  backend  state                      memory",
        "   0  node-1  4711  cpu     gloo     idle                      300 MiB",
        "   1  node-1  4712  cpu     gloo     in <all_reduce> · In [7]        –",
    ]


def test_device_memory_column_appears_only_with_devices() -> None:
    on_gpu = dataclasses.replace(RANKS[0], device="cuda:0", device_bytes=3 * 2**30)
    card = cluster_card(dataclasses.replace(INFO, ranks=(on_gpu, RANKS[1])))
    assert "on device" in card["text/plain"]
    assert "3.00 GiB" in card["text/html"]
    assert "on device" not in cluster_card(INFO)["text/html"]


def test_html_is_escaped_and_has_no_script() -> None:
    html = cluster_card(INFO)["text/html"]
    assert "in &lt;all_reduce&gt;" in html
    assert "<script" not in html
    assert "<details open>" in html


def test_many_ranks_are_folded() -> None:
    many = tuple(dataclasses.replace(RANKS[0], rank=rank) for rank in range(64))
    assert "<details><summary>" in cluster_card(dataclasses.replace(INFO, ranks=many, num_ranks=64))["text/html"]


def test_card_of_a_lost_cluster() -> None:
    card = cluster_card(dataclasses.replace(INFO, running=False, ranks=()))
    assert card["text/plain"].startswith("default: not running, 2 ranks")
    assert "not running" in card["text/html"]


def test_status_has_units_for_people_and_bytes_for_code() -> None:
    status = ClusterStatus(INFO)
    shown = status._repr_mimebundle_()
    for text in (shown["text/html"], shown["text/plain"], repr(status)):
        assert "300 MiB" in text
        assert str(300 * 2**20) not in text
        assert "<NA>" not in text
        assert "NaN" not in text
    frame = status.to_frame()
    assert frame["memory"].tolist() == [300 * 2**20, 0]
    assert frame["cell"].tolist()[1] == 7
