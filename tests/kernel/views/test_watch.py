"""`--watch` in a real kernel: states are sent only while the view is open."""

from __future__ import annotations

from pathlib import Path

from tests.kernel.recovery.conditions import MEET
from tests.support.kernel import Kernel
from tests.support.processes import until

SEES = """
import pathlib
from axon_nb.widgets.cell.views import RankStrip
t_add = RankStrip.add
def t_sees(self, states):
    states = list(states)
    t_add(self, states)
    if any(state.call == "barrier" and state.activity.name == "WAITING" for state in states):
        pathlib.Path({path!r}).touch()
RankStrip.add = t_sees"""


def test_watch_ends_as_a_picture_and_a_table(kernel: Kernel, tmp_path: Path) -> None:
    seen = str(tmp_path / "seen")
    kernel.ok(SEES.format(path=seen))
    code = f"if rank:\n    t_meet({seen!r})\ndist.barrier()"
    reply = kernel.ok(f"%%distributed --watch\n{MEET}{code}")
    kernel.ok("RankStrip.add = t_add")
    (picture,) = (bundle for bundle in reply.displays if "text/html" in bundle)  # not who is waited for
    strip, timeline = picture["text/html"].split("<b>Timeline, ")
    for part in (strip, timeline):
        assert "data:image/svg+xml;base64," in part
        assert "<table" in part
    assert "barrier" in strip + picture["text/plain"].split("Timeline, ")[0]


def test_failing_cell_freezes_its_view(kernel: Kernel) -> None:
    reply = kernel.run(
        "%%distributed --watch\nimport time\ntime.sleep(0.3)\nif rank == 1:\n    raise ValueError('x')\ndist.barrier()"
    )
    assert reply.traceback.startswith("[rank 1]")
    picture = next(bundle for bundle in reply.displays if "axon-picture" in bundle.get("text/html", ""))
    assert "data:image/svg+xml;base64," in picture["text/html"]
    words = picture["text/plain"]
    assert "rank 1: failed after" in words
    assert words.count("stopped in barrier, line 6") == 3, words


def test_closed_view_receives_no_messages(kernel: Kernel) -> None:
    kernel.ok(
        "import axon_nb\nt_client = axon_nb.current_cluster().client\nt_seen = []\n"
        "from axon_nb.records.protocol.inspection import WatchRequest\n"
        "for t_rank in range(4): t_client.request(t_rank, WatchRequest(20, 0)).result(60)"
    )
    senders = "[t for t in threading.enumerate() if t.name == 'axon_nb-telemetry']"  # of cells that were watched
    kernel.ok(f"%%distributed\nimport threading, time\nwhile {senders}: time.sleep(0.01)")
    kernel.ok("t_client.on_telemetry(lambda event: t_seen.append(event.rank))")
    kernel.ok("%%distributed\nimport time\ntime.sleep(0.5)")
    assert kernel.value("t_seen") == []
    kernel.ok("t_client.request(2, WatchRequest(20, 300)).result(60);")
    assert until(lambda: kernel.value("len(t_seen) > 2"))
    assert kernel.value("sorted(set(t_seen))") == [2]
    kernel.ok("t_client.request(2, WatchRequest(20, 0)).result(60);\nt_client.on_telemetry(None)")


def test_status_shows_where_a_stuck_rank_waits(kernel: Kernel, tmp_path: Path) -> None:
    asked = tmp_path / "asked"
    wait = f"import os, time\n    while not os.path.exists({str(asked)!r}): time.sleep(0.01)"
    kernel.ok(f"%%distributed --noblock --out t_handle\nif rank == 0:\n    {wait}\ndist.barrier()")
    states = "list(axon_nb.current_cluster().status()['state'])"
    kernel.ok("import axon_nb")
    found = until(lambda: "in barrier at line 5" in " ".join(kernel.value(states)))
    asked.touch()
    kernel.ok("t_handle.result(100);")
    assert found


def test_result_reopens_its_views(kernel: Kernel) -> None:
    kernel.ok("%%distributed --watch --out t_result\nfor _ in range(3):\n    dist.all_reduce(torch.ones(10))")
    kernel.ok("%%distributed\ndist.barrier()")  # later calls are not part of it
    reply = kernel.ok("t_result.show()")
    assert ["application/vnd.jupyter.widget-view+json" in bundle for bundle in reply.displays] == [True, True, False]
    assert reply.displays[2]["text/html"].count("data:image/svg+xml;base64,") > 4
    text = reply.displays[2]["text/plain"]
    assert "In [" in text.splitlines()[0]
    assert "barrier" not in text
    # Any number of times; not in another process, where there is nothing to show.
    assert len(kernel.ok("t_result.show()").displays) == 3
    kernel.ok("import pickle\nt_other = pickle.loads(pickle.dumps(t_result))")
    assert kernel.value("(t_other == t_result, t_other.seconds == t_result.seconds)") == (True, True)
    kernel.ok("%%distributed --out t_plain\n1")
    for name in ("t_other", "t_plain"):
        refused = kernel.run(f"{name}.show()")
        assert refused.ename == "UsageError"
        assert "No live view was recorded: rerun the cell as `%%distributed --watch --out result`" in refused.traceback


def test_failing_view_does_not_break_the_cell(kernel: Kernel) -> None:
    kernel.ok(
        "from axon_nb.widgets.cell.views import RankStrip\nt_flush, t_start = RankStrip.flush, RankStrip.start\n"
        "def t_broken(*_): raise RuntimeError('t_broken')"
    )
    try:
        for name in ("flush", "start", "finish", "add"):
            kernel.ok(f"t_before = RankStrip.{name}\nRankStrip.{name} = t_broken")
            reply = kernel.run("%%distributed --watch\nimport time\ntime.sleep(0.3)\nrank")
            kernel.ok(f"RankStrip.{name} = t_before")
            assert reply.ok, reply.traceback
            assert "[rank 3] 3" in reply.stdout + str(reply.displays)
    finally:
        kernel.ok("RankStrip.flush, RankStrip.start = t_flush, t_start")
