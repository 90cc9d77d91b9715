"""When one rank's part in a cell is over: its reply and its last output come by different ways, in any order."""

from __future__ import annotations

from axon_nb.cluster.cells.options import Part


def test_output_that_is_late_is_waited_for() -> None:
    part = Part()
    assert not part.over(1000.0)
    part.replied_at = 1000.0
    assert not part.over(1004.0)
    part.idle = True
    assert part.over(1004.0)


def test_nothing_is_waited_for_without_end() -> None:
    assert Part(replied_at=1000.0).over(1006.0)


def test_who_is_gone_after_its_reply_sends_little_more() -> None:
    part = Part(replied_at=1000.0, gone_at=1003.0)
    assert not part.over(1003.1)
    assert part.over(1004.0)
