"""Connecting a group: ranks may begin with it at very different times, as on a busy machine."""

from __future__ import annotations

import threading
import time
from datetime import timedelta
from typing import Any

import torch
from torch._C._distributed_c10d import HashStore

from axon_nb.engine.groups.gloo import GlooTransport

LATE_S = 4.0


def test_late_rank_is_waited_for_when_connecting() -> None:
    store, gloo, made = HashStore(), GlooTransport(), dict[int, Any]()

    def join(rank: int) -> None:
        made[rank] = gloo.connect(store, rank, 2, timeout=timedelta(seconds=60), raise_if_cancelled=lambda: None)

    first = threading.Thread(target=join, args=(0,))
    first.start()
    time.sleep(LATE_S)
    join(1)
    first.join(120)
    sums = [torch.ones(1), torch.ones(1)]
    works = [made[rank].allreduce([sums[rank]]) for rank in (0, 1)]
    assert all(work.wait() for work in works)
    assert [value.item() for value in sums] == [2.0, 2.0]
