"""Other threads of ranks: the user's may still communicate, those of libraries do not."""

from __future__ import annotations

from pathlib import Path

from tests.support.kernel import Kernel

# A small message need not wait for its receiver: on shared memory its sender goes on.
RECEIVES_LATER = """%%distributed
import os, threading, time
got = torch.zeros(4_000_000)
def receive():
    while not os.path.exists({!r}):
        time.sleep(0.01)
    dist.recv(got, 0)
if rank == 1:
    receiver = threading.Thread(target=receive)
    receiver.start()
if rank == 0:
    dist.send(torch.ones(4_000_000), 1)"""
TIMER = """%%distributed
import threading
got = torch.zeros(4_000_000)
if rank == 1:
    receiver = threading.Timer(4, dist.recv, (got, 0))
    receiver.start()
if rank == 0:
    dist.send(torch.ones(4_000_000), 1)"""
WAITS_IN_A_RING = """%%distributed
import threading, time
from axon_nb.engine.kernel.control import user_threads
from concurrent.futures import ThreadPoolExecutor
from torch.utils.data import DataLoader
pool = ThreadPoolExecutor(1)
pool.submit(time.time).result()
for number, batch in enumerate(DataLoader(torch.arange(8), num_workers=1)):
    if number == 2 and rank in (2, 3):
        t_running, t_counted = threading.active_count() - 1, user_threads()
        dist.recv(torch.zeros(1), 5 - rank)"""


def test_late_user_thread_is_waited_for_after_its_rank_finished(kernel: Kernel, tmp_path: Path) -> None:
    come = tmp_path / "come"
    request = kernel.submit(RECEIVES_LATER.format(str(come)))
    kernel.wait_for_output(request, "rank 0 has been in send")
    come.touch()
    assert kernel.collect(request).ok
    assert kernel.ok("%%distributed --ranks 1\nreceiver.join(60)\ngot.mean().item()").lines() == ["[rank 1] 1.0"]


def test_pending_timer_is_waited_for(kernel: Kernel) -> None:
    kernel.ok(TIMER)
    assert kernel.ok("%%distributed --ranks 1\nreceiver.join(60)\ngot.mean().item()").lines() == ["[rank 1] 1.0"]


def test_library_threads_are_not_waited_for(kernel: Kernel) -> None:
    """Those of a data loader and of a pool without work run on each rank here."""
    reply = kernel.run(WAITS_IN_A_RING)
    assert "rank 2 waits in recv at line 11 for rank 3; rank 3 waits in recv at line 11 for rank 2" in reply.traceback
    # A rank with a user's thread would have been waited for for 30 s; how long it took says little on a busy machine.
    counted = kernel.ok("%%distributed --ranks 2,3\nt_running >= 2, t_counted").lines()
    assert counted == ["[ranks 2-3] (True, [])"]
    kernel.ok("%%distributed\npool.shutdown()\ndist.all_reduce(torch.ones(1))")
