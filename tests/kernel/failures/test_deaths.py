"""Reports of dead ranks: signal or exit code, line of the cell, last output; memory that ran out, reached limits."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.support.kernel import FreshCluster, Kernel
from tests.support.processes import ended, until

CGROUP = os.environ.get("AXON_NB_TEST_CGROUP", "")
"""Folder of an empty memory cgroup with a limit, such as 3 GiB, that this user may put processes into."""

TRAIN = """%%distributed
model = torch.nn.Linear(256, 256)
optimizer = torch.optim.Adam(model.parameters())
model(torch.ones(1, 256)).sum().backward()
optimizer.step()
def attend():
    scores = torch.zeros(1 << 20)  # held by this frame alone
    return torch.empty(1 << 60)"""

SUM = "t = torch.ones(1)\ndist.all_reduce(t)\nt.item(), kept - rank"


@pytest.fixture(scope="module")
def mortal() -> Iterator[Kernel]:
    """A kernel with 3 ranks; each test leaves a dead one, which the next test's repair replaces."""
    with Kernel() as kernel:
        kernel.ok("%load_ext axon_nb\n%distributed start -n 3\n%distributed config auto_repair=on")
        yield kernel


DEATHS = {
    "exit code": ("os._exit(3)", "rank 1 exited with code 3"),
    "segfault": ("ctypes.string_at(0)", "rank 1 was killed by SIGSEGV at line 4 (ctypes string_at)"),
    "segfault in a function": ("crash()", "rank 1 was killed by SIGSEGV at line 4 (ctypes string_at)"),
    "abort": ("os.abort()", "rank 1 was killed by SIGABRT at line 4"),
    "kill": ("os.kill(os.getpid(), signal.SIGKILL)", "rank 1 was killed by SIGKILL"),
    "last line": (
        "os.write(2, b'first\\nthe reason\\n'); os._exit(1)",
        "rank 1 exited with code 1; last line: the reason",
    ),
    "awaited": ("await asyncio.sleep(0.01); ctypes.string_at(0)", "was killed by SIGSEGV at line 4 (ctypes string_at)"),
}
IMPORTS = "%%distributed\nimport asyncio, ctypes, os, signal, time\ndef crash():\n    return ctypes.string_at(0)"


@pytest.mark.parametrize("how", DEATHS)
@pytest.mark.parametrize("others", ["dist.barrier()", "time.sleep(600)"], ids=["waited for", "not waited for"])
def test_dead_rank_is_reported_with_cause(mortal: Kernel, how: str, others: str) -> None:
    code, reported = DEATHS[how]
    mortal.ok(IMPORTS)
    reply = mortal.run(f"%%distributed\n\nif rank == 1:\n    {code}\n{others}")
    assert reply.ename == "CellError"
    assert reported in reply.traceback
    assert "out of memory" not in reply.traceback
    assert "`%distributed repair`" in reply.traceback


def test_crash_in_c_code_is_reported_with_cause(mortal: Kernel) -> None:
    code = "if rank == 1:\n    os.write(2, b'  what():  [enforce fail at pair.cc]\\n')\n    os.abort()\ndist.barrier()"
    reply = mortal.run(f"%%distributed\nimport os\n{code}")
    assert "rank 1 was killed by SIGABRT at line 5" in reply.traceback
    assert "; last line: what():  [enforce fail at pair.cc]" in reply.traceback


def test_rank_death_during_a_large_send_releases_the_sender(mortal: Kernel) -> None:
    mortal.ok(IMPORTS)
    code = """t = torch.zeros(64 << 20)
if rank == 0:
    dist.send(t, 1)
elif rank == 1:
    import threading
    threading.Timer(0.05, os._exit, (7,)).start()
    dist.recv(t, 0)
    time.sleep(600)
else:
    dist.barrier()"""
    reply = mortal.run(f"%%distributed\n{code}")
    assert "rank 1 exited with code 7" in reply.traceback
    after = mortal.ok("%%distributed\nt = torch.ones(1)\ndist.all_reduce(t)\nt.item()")
    assert "[ranks 0-2] 3.0" in after.lines()


def test_rank_death_outside_a_cell_does_not_hide_a_deadlock(mortal: Kernel) -> None:
    mortal.ok("%%distributed --quiet --out t_pids\nimport os\nos.getpid()")
    code = f"if rank == 0:\n    os.kill({mortal.value('t_pids.values[2]')}, 9)\n    dist.barrier(group=subgroup)"
    reply = mortal.run(f"%%distributed --ranks 0-1\n{code}")
    assert "rank 0 waits in barrier at line 4 for rank 1, which has finished the cell" in reply.traceback


def test_idle_rank_death_is_reported_at_once_and_by_the_next_cell(fresh_cluster: FreshCluster) -> None:
    kernel = fresh_cluster(2)
    kernel.ok("import axon_nb")
    request = kernel.submit("axon_nb.cluster.session.current.get().signal(1, 9)")
    reply = kernel.collect(request)
    kernel.follow(request, reply, until=lambda: "Idle rank 1 was killed by SIGKILL." in reply.stderr)
    assert "Rank 1 was killed by SIGKILL." in kernel.run("%%distributed\n1").traceback


@pytest.mark.parametrize("code", ["import sys; sys.exit(3)", "raise SystemExit('enough')", "exit()", "quit()"])
def test_python_exit_ends_the_cell_but_not_the_rank(kernel: Kernel, code: str) -> None:
    pids = kernel.ok("%%distributed\nimport os\nos.getpid()").lines()
    reply = kernel.run(f"%%distributed\nif rank == 2:\n    {code}\ndist.barrier()")
    assert reply.traceback.startswith("[rank 2]\nSystemExit at line 3: sys.exit(")
    assert "the rank keeps running with its state" in reply.traceback
    assert reply.stderr == ""
    assert kernel.ok("%%distributed\nos.getpid()").lines() == pids


WORKERS = """%%distributed
import os, time
from torch.utils.data import DataLoader

class Slow:
    def __len__(self):
        return 10**6
    def __getitem__(self, index):
        time.sleep(0.01)
        return torch.zeros(3)

def loop():
    for number, batch in enumerate(DataLoader(Slow(), batch_size=2, num_workers=2)):
        if number == 3:
            import psutil
            print("workers", [p.pid for p in psutil.Process().children()], flush=True)
        yield batch
"""


def runs(pid: int) -> bool:
    """Whether there is a process of this number that has not ended."""
    try:
        return not ended(psutil.Process(pid))
    except psutil.NoSuchProcess:
        return False


@pytest.mark.parametrize("how", ["interrupt", "kill", "another rank's failure"])
def test_dataloader_workers_die_with_their_rank(fresh_cluster: FreshCluster, how: str) -> None:
    kernel = fresh_cluster(2)
    kernel.ok(WORKERS)
    last = {"kill": "os.kill(os.getpid(), 9)", "another rank's failure": "1 / 0"}.get(how, "pass")
    body = f"for number, batch in enumerate(loop()):\n    if rank == 1 and number == 20:\n        {last}"
    request = kernel.submit(f"%%distributed\n{body}")
    kernel.wait_for_output(request, "[rank 1] workers")
    if how == "interrupt":
        kernel.interrupt()
    reply = kernel.collect(request)
    pids = [int(pid) for pid in re.findall(r"\d{3,}", " ".join(re.findall(r"workers \[(.*?)\]", reply.stdout)))]
    # A rank that raised itself keeps its traceback, as IPython does; the others and the dead keep nothing.
    kernel.run("%%distributed\n1")
    assert pids
    assert until(lambda: not any(map(runs, pids))), [pid for pid in pids if runs(pid)]


def test_output_of_c_code_and_children_is_shown_in_order(kernel: Kernel) -> None:
    code = """import ctypes, os, subprocess, sys
print("one")
os.system("echo two")
print("three")
subprocess.run(["echo", "four"], stdout=sys.stdout)
os.write(2, b"to stderr\\n")
ctypes.CDLL(None).puts(b"five")
ctypes.CDLL(None).fflush(None)"""
    for _ in range(5):
        reply = kernel.ok(f"%%distributed --ranks 0\n{code}")
        assert reply.lines() == [f"[rank 0] {word}" for word in ("one", "two", "three", "four", "five", "0")]
        assert reply.stderr == "[rank 0] to stderr\n"


def test_child_output_flood_is_bounded_and_leaves_no_large_file(kernel: Kernel) -> None:
    flood = "yes | head -c 200000000; echo done"
    reply = kernel.ok(f"%%distributed --ranks 0\nimport os\nos.system({flood!r})", timeout=120)
    assert "done" in reply.stdout
    assert len(reply.stdout) < 5_000_000
    folder = kernel.value("str(__import__('axon_nb').cluster.current.get().connection.run_dir.path)")
    kernel.ok("%%distributed --ranks 0\nprint(1)")
    files = list(Path(folder).rglob("*.out"))
    assert until(lambda: max(file.stat().st_blocks * 512 for file in files) < 50_000_000)


@pytest.mark.skipif(not CGROUP, reason="AXON_NB_TEST_CGROUP names no memory cgroup with a limit")
def test_rank_killed_by_memory_limit_is_reported_as_such() -> None:
    with Kernel() as kernel:
        (Path(CGROUP) / "cgroup.procs").write_text(str(kernel.pid))
        kernel.ok("%load_ext axon_nb\n%distributed start -n 2")
        grow = "hold = []\nwhile True: hold.append(bytearray(64 << 20))"
        code = f"if rank == 1:\n    exec({grow!r})\ndist.barrier()"
        reply = kernel.run(f"%%distributed\n{code}", timeout=120)
        assert "rank 1 was killed by SIGKILL: out of memory" in reply.traceback
        assert "Replaced rank 1" in kernel.ok("%distributed repair").stdout
        kernel.run("%%distributed\nimport os, signal\nif rank == 1: os.kill(os.getpid(), signal.SIGKILL)")
        assert "out of memory" not in kernel.run("%%distributed\n1").traceback


def test_rank_without_memory_names_what_holds_it(fresh_cluster: FreshCluster) -> None:
    kernel = fresh_cluster(2)
    kernel.ok(TRAIN)
    text = kernel.run("%%distributed\nif rank == 1:\n    attend()").traceback
    # 256 x 257 numbers of 4 bytes; Adam has two of each, and two step counters.
    found = re.search(
        r"Rank 1 ran out of memory; its tensors took (\S+ MiB) of \S+ GiB: (.*?)\.\s+With FSDP", text, re.S
    )
    assert found is not None, text
    # The copies are those for undo; with them come random states.
    parts = r"other 4\.0\d MiB, copies 1\.0\d MiB, optimizer 514 KiB, parameters 257 KiB, gradients 257 KiB"
    assert re.fullmatch(rf"6\.0\d MiB: {parts}", f"{found[1]}: {found[2]}"), text
    assert "parameters, gradients and optimizer states would take 514 KiB per rank instead of 1.00 MiB." in text
    assert "ran out of memory" not in kernel.run("%%distributed\nraise ValueError('no memory')").traceback
    kernel.ok("%%distributed\nmodel(torch.ones(1, 256)).sum().item()")


@pytest.fixture(scope="module")
def gloo() -> Iterator[Kernel]:
    """A kernel that may open 1024 files, with 2 ranks on Gloo."""
    with Kernel(env={"AXON_NB_CPU_BACKEND": "gloo"}) as kernel:
        kernel.ok("import resource\nresource.setrlimit(resource.RLIMIT_NOFILE, (1024, 4096))")
        kernel.ok("%load_ext axon_nb\n%distributed start -n 2")
        kernel.ok("%%distributed\nimport os, resource, threading\nkept = rank")
        yield kernel


def test_rank_has_the_hard_open_file_limit(gloo: Kernel) -> None:
    reply = gloo.ok("%%distributed\nresource.getrlimit(resource.RLIMIT_NOFILE)")
    assert reply.lines() == ["[ranks 0-1] (4096, 4096)"]
    assert gloo.value("resource.getrlimit(resource.RLIMIT_NOFILE)") == (1024, 4096)


def test_rank_out_of_descriptors_reports_it_and_survives(gloo: Kernel) -> None:
    lower = "used = len(os.listdir('/proc/self/fd'))\nresource.setrlimit(resource.RLIMIT_NOFILE, (used + 8, 4096))"
    gloo.ok(f"%%distributed --ranks 1\n{lower}")
    reply = gloo.run("%%distributed\ndist.new_group([0, 1])")
    assert "A process group of 2 ranks needs up to 20 more open files" in reply.traceback
    gloo.ok("%%distributed --ranks 1\nresource.setrlimit(resource.RLIMIT_NOFILE, (4096, 4096))")
    gloo.run("%distributed repair")  # refuses if the groups have been rebuilt already
    assert gloo.ok(f"%%distributed\ndist.new_group([0, 1])\n{SUM}").lines() == ["[ranks 0-1] (2.0, 0)"]


WAITS = {
    "Python": "dist.barrier()",
    "C++": "model(torch.ones(1, 4)).sum().backward()",
    "monitored_barrier": "dist.monitored_barrier()",
}


@pytest.mark.parametrize("where", WAITS)
def test_rank_survives_thread_exhaustion_in_a_failing_cell(gloo: Kernel, where: str) -> None:
    model = "model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))"
    gloo.ok(f"%%distributed\n{model}\nmodel(torch.ones(1, 4)).sum().backward()")
    # A stack of 32 TiB: the system refuses each new thread, as it does at a limit of processes.
    fails = "if rank == 0: raise ValueError('bug')\nold = threading.stack_size(2**45)"
    reply = gloo.run(f"%%distributed\n{fails}\n{WAITS[where]}")
    assert "ValueError: bug" in reply.traceback
    gloo.ok("%%distributed --ranks 1\nthreading.stack_size(old)")
    gloo.run("%distributed repair")  # refuses if the groups have been rebuilt already
    assert gloo.ok(f"%%distributed\n{SUM}").lines() == ["[ranks 0-1] (2.0, 0)"]
