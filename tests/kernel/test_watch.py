"""`--watch` in a real kernel: states are sent while somebody looks, and only then."""

from __future__ import annotations

from tests.kernel.driver import Kernel


def test_watch_ends_as_a_picture_and_a_table(kernel: Kernel) -> None:
    reply = kernel.ok(
        "%%distributed --watch\nimport time\ntime.sleep(0.5)\nif rank:\n    time.sleep(1)\ndist.barrier()"
    )
    assert len(reply.displays) == 2  # the strip, and the timeline
    assert "data:image/svg+xml;base64," in reply.displays[0]["text/html"]
    assert "<table" in reply.displays[0]["text/html"]
    assert "barrier" in reply.displays[0]["text/plain"] + reply.displays[0]["text/html"]


def test_a_failing_cell_freezes_its_view_too(kernel: Kernel) -> None:
    reply = kernel.run("%%distributed --watch\nimport time\ntime.sleep(0.3)\nif rank == 1:\n    raise ValueError('x')")
    assert reply.traceback.startswith("[rank 1]")
    assert "data:image/svg+xml;base64," in reply.displays[0]["text/html"]


def test_nothing_is_sent_when_nobody_looks(kernel: Kernel) -> None:
    kernel.ok(
        "import axon_nb\nt_client = axon_nb.cluster.current.get().client\nt_seen = []\n"
        "t_client.on_telemetry(lambda content: t_seen.append(content['rank']))"
    )
    kernel.ok("%%distributed\nimport time\ntime.sleep(0.5)")
    assert kernel.value("t_seen") == []
    kernel.ok("t_client.request(2, 'axon_watch', hz=20, seconds=30).result(5);")
    kernel.ok("%%distributed\nimport time\ntime.sleep(0.5)")
    assert kernel.value("sorted(set(t_seen))") == [2]
    kernel.ok("t_client.request(2, 'axon_watch', hz=20, seconds=0).result(5);\nt_client.on_telemetry(None)")


def test_status_says_where_a_stuck_rank_waits(kernel: Kernel) -> None:
    kernel.ok("%%distributed --noblock --out t_handle\nimport time\nif rank == 0:\n    time.sleep(1.5)\ndist.barrier()")
    kernel.ok(
        "import time\nt_end = time.monotonic() + 20\n"
        "t_c = axon_nb.cluster.current.get()\nt_states = []\n"
        "while 'barrier' not in ' '.join(t_states) and time.monotonic() < t_end:\n"
        "    time.sleep(0.02)\n    t_states = list(t_c.status()['state'])"
    )
    assert "in barrier at line 5" in " ".join(kernel.value("t_states"))
    kernel.ok("t_handle.result(30);")


def test_a_result_opens_its_views_again(kernel: Kernel) -> None:
    kernel.ok("%%distributed --watch --out t_result\nfor _ in range(3):\n    dist.all_reduce(torch.ones(10))")
    kernel.ok("%%distributed\ndist.barrier()")  # what comes later is no part of it
    reply = kernel.ok("t_result.show()")
    assert ["application/vnd.jupyter.widget-view+json" in bundle for bundle in reply.displays] == [True, True, False]
    assert reply.displays[2]["text/html"].count("data:image/svg+xml;base64,") > 4
    text = reply.displays[2]["text/plain"]
    assert text.startswith("In [")
    assert "barrier" not in text
    # Any number of times; not in another process, where there is nothing to show.
    assert len(kernel.ok("t_result.show()").displays) == 3
    kernel.ok("import pickle\nt_other = pickle.loads(pickle.dumps(t_result))")
    assert kernel.value("(t_other == t_result, t_other.seconds == t_result.seconds)") == (True, True)
    kernel.ok("%%distributed --out t_plain\n1")
    for name in ("t_other", "t_plain"):
        refused = kernel.run(f"{name}.show()")
        assert refused.ename == "UsageError"
        assert "This cell ran without a view: run it as `%%distributed --watch --out result`" in refused.traceback


def test_a_view_that_fails_does_not_break_the_cell(kernel: Kernel) -> None:
    kernel.ok(
        "from axon_nb.widgets.strip import RankStrip\nt_flush, t_start = RankStrip.flush, RankStrip.start\n"
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
