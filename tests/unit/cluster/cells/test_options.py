"""When one rank is done with a cell: its reply and its last output come by different ways, in any order."""

from __future__ import annotations

from axon_nb.cluster.cells.options import RankProgress


def test_late_output_is_waited_for() -> None:
    assert not RankProgress().is_done(1000.0)
    assert not RankProgress(replied_at=1000.0).is_done(1004.0)
    assert RankProgress(replied_at=1000.0, idle=True).is_done(1004.0)


def test_output_that_is_still_being_processed_is_waited_for() -> None:
    assert not RankProgress(replied_at=1000.0, processing=True).is_done(1050.0)
    assert not RankProgress(replied_at=1000.0, processed_at=1020.0).is_done(1024.0)


def test_every_wait_is_bounded() -> None:
    assert RankProgress(replied_at=1000.0).is_done(1006.0)
    assert RankProgress(replied_at=1000.0, processed_at=1020.0).is_done(1026.0)
    assert RankProgress(replied_at=1000.0, processing=True).is_done(1061.0)
    assert RankProgress(replied_at=1000.0, processed_at=1060.0).is_done(1061.0)


def test_rank_lost_after_its_reply_is_waited_for_briefly() -> None:
    progress = RankProgress(replied_at=1000.0, gone_at=1003.0)
    assert not progress.is_done(1003.1)
    assert progress.is_done(1004.0)
