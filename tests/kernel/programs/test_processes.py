"""Programs that start processes, handle signals and exit."""

from __future__ import annotations

import gzip
import os
from collections.abc import Callable
from pathlib import Path

import pytest

import axon_nb
from axon_nb.cluster.cluster import Cluster
from axon_nb.cluster.session import clusters, current
from tests.support.kernel import Kernel, Reply

SHOUT = "def shout(n):\n    print('child', n, 'speaks')\n    return n * n\n"
FORKED = {
    "a process": "from multiprocessing import Process\np = Process(target=shout, args=(rank,)); p.start(); p.join()",
    "os.fork": (
        "import os\nif (pid := os.fork()) == 0:\n    print('child', rank, 'speaks', flush=True)\n    os._exit(0)\n"
        "_ = os.waitpid(pid, 0)"
    ),
    "an executor": (
        "from concurrent.futures import ProcessPoolExecutor\nfrom multiprocessing import get_context\n"
        "with ProcessPoolExecutor(1, mp_context=get_context('fork')) as pool:\n"
        "    _ = list(pool.map(shout, [rank]))"
    ),
    "a shell": "import subprocess\n_ = subprocess.run(['echo', f'child {rank} speaks'])",
}

SPAWNS = """
import os, sys
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

PORT = str(20000 + os.getppid() % 20000)

def work(rank, size, folder):
    os.environ.update(MASTER_ADDR="localhost", MASTER_PORT=PORT)
    dist.init_process_group("gloo", rank=rank, world_size=size)
    total = torch.full((2,), float(rank + 1))
    dist.all_reduce(total)
    with open(f"{folder}/{rank}", "w") as file:
        file.write(str(total.tolist()))
    dist.barrier()
    dist.destroy_process_group()

def start(folder, size=2):
    mp.spawn(work, args=(size, folder), nprocs=size, join=True)
    return [open(f"{folder}/{rank}").read() for rank in range(size)]

def test_sum(tmp_path):
    assert start(str(tmp_path)) == ["[3.0, 3.0]"] * 2

if __name__ == "__main__":
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
        total = torch.full((2,), float(dist.get_rank() + 1))
        dist.all_reduce(total)
        print(f"torchrun: {total.tolist()}", flush=True)
        dist.destroy_process_group()
    else:
        print(start(sys.argv[1]))
"""
"""Starts two ranks as the tests of courses do, is a test itself, and runs under torchrun."""

LEAVE = """
import atexit, gzip, multiprocessing.shared_memory, pathlib
folder = pathlib.Path({folder!r})
plain = open(folder / f"plain{{rank}}", "w"); plain.write("x" * 100)
packed = gzip.open(folder / f"packed{{rank}}", "wt"); packed.write("y" * 1000)
atexit.register(lambda: (folder / f"handler{{rank}}").write_text("ran"))
memory = multiprocessing.shared_memory.SharedMemory(create=True, size=1000, name={name!r} + str(rank))
"""

ALARM = (
    "import signal, time\ndef late(*_):\n    raise TimeoutError('late')\nbefore = signal.signal(signal.SIGALRM, late)\n"
)
LEAVE_BY_SIGNAL = (
    "if rank == 0:\n    signal.alarm(1)\n    try:\n        {call}\n    except TimeoutError:\n        print('caught')\n"
    "else:\n    time.sleep(1.5)\nsignal.alarm(0)\n_ = signal.signal(signal.SIGALRM, before)"
)
CALLS = {"all_reduce": "dist.all_reduce(torch.ones(1))", "recv": "dist.recv(torch.ones(1), 1)"}


def ranks_and_lines(reply: Reply) -> list[str]:
    return sorted(line for line in reply.lines() if "speaks" in line)


@pytest.mark.parametrize("how", FORKED)
def test_child_output_is_shown_under_its_rank(kernel: Kernel, how: str) -> None:
    reply = kernel.ok(f"%%distributed\n{SHOUT}{FORKED[how]}")
    assert ranks_and_lines(reply) == [f"[rank {rank}] child {rank} speaks" for rank in range(4)]


def test_spawned_child_prints(kernel: Kernel, tmp_path: Path) -> None:
    (tmp_path / "spoken.py").write_text("def shout(n):\n    print('child', n, 'speaks')\n")
    reply = kernel.ok(
        f"%%rank 1\nimport sys; sys.path.insert(0, {str(tmp_path)!r})\nimport spoken\n"
        "from multiprocessing import get_context\n"
        "p = get_context('spawn').Process(target=spoken.shout, args=(7,)); p.start(); p.join()\np.exitcode"
    )
    assert reply.lines() == ["[rank 1] child 7 speaks", "[rank 1] 0"]


def test_child_traceback_is_shown(kernel: Kernel) -> None:
    reply = kernel.ok(
        "%%rank 2\nfrom multiprocessing import Process\ndef bad():\n    raise KeyError('child failed')\n"
        "p = Process(target=bad); p.start(); p.join()\np.exitcode"
    )
    assert "[rank 2] KeyError: 'child failed'" in reply.stderr
    assert reply.lines() == ["[rank 2] 1"]


def test_warnings_and_logs_of_a_child_are_shown(kernel: Kernel) -> None:
    reply = kernel.ok(
        "%%rank 0\nimport logging, warnings\nfrom multiprocessing import Process\n"
        "def talk():\n    warnings.warn('careful')\n    logging.getLogger('mine').warning('logged')\n"
        "p = Process(target=talk); p.start(); p.join()"
    )
    assert "UserWarning: careful" in reply.stderr
    assert "logged" in reply.stderr


def test_child_terminates_at_once(kernel: Kernel) -> None:
    reply = kernel.ok(
        "%%distributed\nimport time\nfrom multiprocessing import Process\n"
        "p = Process(target=time.sleep, args=(600,)); p.start(); p.terminate(); p.join(60)\np.exitcode"
    )
    assert reply.lines() == ["[ranks 0-3] -15"]


def test_user_signal_handler_is_inherited_by_children(kernel: Kernel) -> None:
    reply = kernel.ok(
        "%%rank 1\nimport os, signal, time\nbefore = signal.signal(signal.SIGUSR1, lambda *_: os._exit(7))\n"
        "from multiprocessing import Process\np = Process(target=time.sleep, args=(600,)); p.start()\n"
        "os.kill(p.pid, signal.SIGUSR1); p.join()\n_ = signal.signal(signal.SIGUSR1, before)\np.exitcode"
    )
    assert reply.lines() == ["[rank 1] 7"]


def test_child_lines_are_whole_and_rank_output_is_not_repeated(kernel: Kernel) -> None:
    reply = kernel.ok(
        "%%rank 3\nfrom multiprocessing import Process\nprint('before')\n"
        "def talk(n):\n    for i in range(50): print('line', n, i)\n"
        "children = [Process(target=talk, args=(n,)) for n in range(4)]\n"
        "for p in children: p.start()\nfor p in children: p.join()\nprint('after')"
    )
    assert reply.stdout.count("before") == 1
    lines = [line for line in reply.lines() if "] line" in line]
    assert sorted(lines) == sorted(f"[rank 3] line {n} {i}" for n in range(4) for i in range(50))


def test_interrupt_ends_the_children(kernel: Kernel) -> None:
    request = kernel.submit(
        "%%distributed\nimport subprocess, time\nfrom multiprocessing import Process\n"
        "child = Process(target=time.sleep, args=(600,))\nchild.start()\n"
        "other = subprocess.Popen(['sleep', '600'])\nprint('started', flush=True)\nchild.join()"
    )
    kernel.wait_for_output(request, "started", ranks=range(4))
    kernel.interrupt()
    assert kernel.collect(request).status == "error"
    kernel.ok("%%distributed --out t_codes --quiet\nchild.join(60); (child.exitcode, other.wait(60))")
    assert kernel.value("list(t_codes.values.values())") == [(1, -2)] * 4


STARTED_OTHERWISE = {
    "pools, one after the other": (
        "from multiprocessing import Pool\nfor _ in range(5):\n    with Pool(2) as pool:\n"
        "        result = pool.map(abs, range(3))"
    ),
    "joblib": "import joblib\nresult = joblib.Parallel(2)(joblib.delayed(abs)(-i) for i in range(3))",
    "forkserver": (
        "from multiprocessing import get_context\nwith get_context('forkserver').Pool(2) as pool:\n"
        "    result = pool.map(abs, [0, -1, -2])"
    ),
    "DataLoader": (
        "from torch.utils.data import DataLoader\n"
        "result = [int(batch) for batch in DataLoader(range(3), num_workers=2)]"
    ),
    "threads": (
        "from concurrent.futures import ThreadPoolExecutor\nwith ThreadPoolExecutor(2) as pool:\n"
        "    result = list(pool.map(abs, [0, -1, -2]))"
    ),
}


@pytest.mark.parametrize("how", STARTED_OTHERWISE)
def test_other_ways_to_start_workers(kernel: Kernel, how: str) -> None:
    if how == "joblib":
        pytest.importorskip("joblib")
    assert kernel.ok(f"%%distributed\n{STARTED_OTHERWISE[how]}\nresult").lines() == ["[ranks 0-3] [0, 1, 2]"]


@pytest.fixture
def module(tmp_path: Path) -> Path:
    """The folder of the module `spawns`."""
    (tmp_path / "spawns.py").write_text(SPAWNS)
    (tmp_path / "out").mkdir()
    return tmp_path


def test_programs_start_their_own_ranks_beside_a_cluster(kernel: Kernel, module: Path) -> None:
    out = module / "out"
    kernel.ok(f"import sys; sys.path.insert(0, {str(module)!r})\nimport spawns")
    assert kernel.ok(f"print(spawns.start({str(out)!r}))").lines() == ["['[3.0, 3.0]', '[3.0, 3.0]']"]
    assert kernel.ok(f"!{{sys.executable}} {module}/spawns.py {out}").lines() == ["['[3.0, 3.0]', '[3.0, 3.0]']"]
    launched = f"-m torch.distributed.run --standalone --nproc-per-node 2 {module}/spawns.py"
    printed = " ".join(kernel.ok(f"!{{sys.executable}} {launched}").lines())  # two processes may share a line
    assert printed.count("torchrun: [3.0, 3.0]") == 2
    tested = kernel.ok(f"!{{sys.executable}} -m pytest -q -p no:cacheprovider {module}/spawns.py")
    assert any("1 passed" in line for line in tested.lines())
    assert kernel.ok("%%distributed\nt = torch.ones(1)\ndist.all_reduce(t)\nt.item()").lines() == ["[ranks 0-3] 4.0"]


def test_mp_spawn_in_a_cell_calls_the_function_as_its_ranks(kernel: Kernel, module: Path) -> None:
    reply = kernel.ok(
        f"%%distributed\nimport sys; sys.path.insert(0, {str(module)!r})\nimport spawns\n"
        f"spawns.start({str(module / 'out')!r}, 4)"
    )
    assert reply.lines()[-1] == "[ranks 0-3] ['[10.0, 10.0]', '[10.0, 10.0]', '[10.0, 10.0]', '[10.0, 10.0]']"
    kernel.ok("%%distributed\nimport torch.multiprocessing as mp\nmp.start_processes(print, args=('said',), nprocs=4)")


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (
            "mp.spawn(print, nprocs=2)",
            "each of the 4 ranks calls fn. Pass nprocs=world_size, or start 2 with `%distributed start -n 2`",
        ),
        (
            "mp.start_processes(print, nprocs=4, join=False)",
            "ranks call fn themselves, and wait for its end; omit join",
        ),
    ],
)
def test_mp_spawn_that_ranks_cannot_serve_says_why(kernel: Kernel, call: str, sentence: str) -> None:
    reply = kernel.run(f"%%distributed\nimport torch.multiprocessing as mp\n{call}")
    assert sentence in reply.traceback


@pytest.mark.parametrize("end", [Cluster.stop, lambda _: clusters.restart()], ids=["stop", "restart"])
def test_exit_handlers_run_and_files_are_written(end: Callable[[Cluster], object], tmp_path: Path) -> None:
    cluster = axon_nb.start(2)
    name = f"axon-test-{os.getpid()}-"
    try:
        cluster.run(LEAVE.format(folder=str(tmp_path), name=name))
        end(cluster)
        for rank in range(2):
            assert (tmp_path / f"plain{rank}").read_text() == "x" * 100
            assert gzip.decompress((tmp_path / f"packed{rank}").read_bytes()) == b"y" * 1000
            assert (tmp_path / f"handler{rank}").read_text() == "ran"
        assert not [one for one in os.listdir("/dev/shm") if one.startswith(name)]
    finally:
        if (left := current.get()) is not None:
            left.stop()


def test_hung_exit_handler_is_killed(tmp_path: Path) -> None:
    cluster = axon_nb.start(2)
    began = tmp_path / "began"
    cluster.run(
        f"import atexit, pathlib, time\n"
        f"atexit.register(lambda: (pathlib.Path({str(began)!r}).write_text('x'), time.sleep(600)))"
    )
    pids = [info.pid for info in cluster.rank_info]
    cluster.stop()
    assert began.exists()
    assert not [pid for pid in pids if Path(f"/proc/{pid}").exists()]


@pytest.mark.parametrize("call", CALLS)
def test_call_left_by_a_raising_handler(kernel: Kernel, call: str) -> None:
    reply = kernel.ok(f"%%distributed\n{ALARM}{LEAVE_BY_SIGNAL.format(call=CALLS[call])}")
    assert "[rank 0] caught" in reply.stdout
    assert f"Rank 0 left {call} at line 9 (TimeoutError) before it was over" in reply.stderr
    assert kernel.ok("%%distributed\nt = torch.ones(1); dist.all_reduce(t); t").lines() == ["[ranks 0-3] tensor([4.])"]


def test_ranks_waiting_for_a_call_left_by_a_handler(kernel: Kernel) -> None:
    late = LEAVE_BY_SIGNAL.format(call=CALLS["all_reduce"]).replace("time.sleep(1.5)", CALLS["all_reduce"])
    reply = kernel.run(f"%%distributed\n{ALARM}if rank == 1:\n    time.sleep(1.5)\n{late}")
    assert "Rank 0 left all_reduce at line 11 (TimeoutError) before it was over" in reply.stderr
    kernel.ok("%%distributed\nimport signal\nsignal.alarm(0)\n_ = signal.signal(signal.SIGALRM, signal.SIG_DFL)")
    assert kernel.ok("%%distributed\nt = torch.ones(1); dist.all_reduce(t); t").lines() == ["[ranks 0-3] tensor([4.])"]


def test_variable_of_an_mpi_launcher_leaves_ranks_their_threads(new_kernel: Callable[..., Kernel]) -> None:
    """MKL takes it as a sign of an MPI without threads, unless OMP_NUM_THREADS is set."""
    kernel = new_kernel(MPI_LOCALNRANKS="1", OMPI_COMM_WORLD_LOCAL_SIZE="1")
    kernel.ok("%load_ext axon_nb\n%distributed start -n 1")
    cell = "import os\ntorch.get_num_threads() == len(os.sched_getaffinity(0)), 'MPI_LOCALNRANKS' in os.environ"
    assert kernel.ok(f"%%distributed\n{cell}").lines() == ["[rank 0] (True, True)"]
