"""The cluster's card and the mesh on it, as words and as HTML."""

from __future__ import annotations

from msgspec.structs import replace

from axon_nb.cluster.inspection.status import ClusterStatus, cluster_card
from axon_nb.records.telemetry import ClusterInfo, MeshInfo, RankInfo

RANKS = (
    RankInfo(0, "node-1", 4711, "cpu", "gloo", "idle", 300 * 2**20, 0, None),
    RankInfo(1, "node-1", 4712, "cpu", "gloo", "in <all_reduce>", 0, 0, 7),
)
INFO = ClusterInfo("default", "gloo", "node-1", 2, True, "axon", RANKS)

MESH_RANKS = tuple(RankInfo(rank, "h", 100 + rank, "cpu", "gloo", "idle", 2**20, 0, None) for rank in range(4))
MESH = MeshInfo("mesh", ("dp", "<tp>"), (2, 2), (0, 1, 2, 3))
MESH_INFO = ClusterInfo("default", "gloo", "h", 4, True, "axon", MESH_RANKS, MESH)


def test_card_as_text() -> None:
    assert cluster_card(INFO)["text/plain"].splitlines() == [
        "default: running, 2 ranks, gloo, on node-1",
        "rank   pid  device  state                      memory",
        "   0  4711  cpu     idle                      300 MiB",
        "   1  4712  cpu     in <all_reduce> · In [7]        –",
    ]


def test_card_that_is_saved_is_the_same_in_each_run() -> None:
    later = tuple(replace(row, pid=row.pid + 1, rss_bytes=row.rss_bytes + 2**20, device_bytes=2**20) for row in RANKS)
    first, second = (cluster_card(replace(INFO, ranks=ranks), measured=False) for ranks in (RANKS, later))
    assert first == second
    assert "   0  cpu     idle" in first["text/plain"]


def test_card_names_what_is_unusual_once() -> None:
    heading, columns, *_ = cluster_card(replace(INFO, backend="shm", engines="slurm"))["text/plain"].splitlines()
    assert heading == "default: running, 2 ranks, shared memory, on node-1, engines: slurm"
    assert "backend" in columns.split(), "ranks have another one than the cluster"


def test_device_memory_column_appears_only_with_devices() -> None:
    on_gpu = replace(RANKS[0], device="cuda:0", device_bytes=3 * 2**30)
    card = cluster_card(replace(INFO, ranks=(on_gpu, RANKS[1])))
    assert "on device" in card["text/plain"]
    assert "3.00 GiB" in card["text/html"]
    assert "on device" not in cluster_card(INFO)["text/html"]


def test_html_is_escaped_and_has_no_script() -> None:
    html = cluster_card(INFO)["text/html"]
    assert "in &lt;all_reduce&gt;" in html
    assert "<script" not in html
    assert "<details open>" in html


def test_table_of_many_rows_is_closed() -> None:
    many = tuple(replace(RANKS[0], rank=rank, state=f"running line {rank}") for rank in range(64))
    assert "<details><summary>" in cluster_card(replace(INFO, ranks=many, num_ranks=64))["text/html"]


def test_many_ranks_that_do_the_same_share_a_row() -> None:
    waiting = RankInfo(
        0, "n", 1, "cuda:0", "nccl", "waiting in all_reduce at line 4 for rank 512,", 1 << 30, 1 << 30, 4
    )
    ranks = [
        replace(
            waiting, rank=rank, host=f"node{rank // 8:03d}", pid=4000 + rank, device=f"cuda:{rank % 8}",
            state=f"{waiting.state} for {rank % 7}.2 s", rss_bytes=(1 << 30) + (rank << 20),
        )
        for rank in range(1024)
    ]  # fmt: skip
    ranks[512] = replace(ranks[512], state="running line 7")
    hosts = ", ".join(f"node{number:03d}" for number in range(128))
    info = ClusterInfo("large", "nccl", hosts, 1024, True, "axon", tuple(ranks))
    text, same = cluster_card(info)["text/plain"].splitlines(), "cuda:0-7"
    assert text[0] == "large: running, 1,024 ranks, nccl, on 128 hosts"
    assert [" ".join(line.split()) for line in text[2:]] == [
        f"0-511,513-1023 128 hosts 1023 pids {same} {waiting.state} for 6.2 s · In [4] 1.00 GiB to 2.00 GiB 1.00 GiB",
        "512 node064 4512 cuda:0 running line 7 · In [4] 1.50 GiB 1.00 GiB",
    ]
    several = tuple(replace(rank, state=f"running line {rank.rank}") for rank in ranks)
    for shown in cluster_card(replace(info, ranks=several)).values():
        assert "… 960 more ranks in 960 more rows" in shown


def test_card_of_a_lost_cluster() -> None:
    card = cluster_card(replace(INFO, running=False, ranks=()))
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


def test_text_has_one_line_per_row() -> None:
    lines = cluster_card(MESH_INFO)["text/plain"].splitlines()
    assert lines[-3:] == ["mesh: dp 2 × <tp> 2", "  dp 0: 0 1", "  dp 1: 2 3"]


def test_html_has_axes_ranks_and_activities() -> None:
    html = cluster_card(MESH_INFO)["text/html"]
    assert "mesh: dp 2 × &lt;tp&gt; 2" in html
    assert '<th scope="col" style="' in html
    assert "&lt;tp&gt; 1</th>" in html
    assert 'title="rank 3: idle"' in html
    assert "line-through" not in html


def test_lost_rank_is_struck_out() -> None:
    dead = replace(MESH_RANKS[2], state="was killed by SIGKILL", rss_bytes=0)
    html = cluster_card(replace(MESH_INFO, ranks=(*MESH_RANKS[:2], dead, MESH_RANKS[3])))["text/html"]
    assert html.count("line-through") == 1
    assert 'title="rank 2: gone"' in html


def test_large_meshes_are_shown_as_text_only() -> None:
    large = MeshInfo("mesh", ("dp", "tp"), (512, 8), tuple(range(4096)))
    card = cluster_card(replace(MESH_INFO, mesh=large))
    assert "dp 512 × tp 8" in card["text/html"]
    assert len(card["text/html"]) < 20_000
