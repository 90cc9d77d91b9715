"""Processes that a rank starts: what they print is shown under their rank, and terminate ends them."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

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


def test_process_pools_terminate(kernel: Kernel) -> None:
    began = time.monotonic()
    reply = kernel.ok(
        "%%distributed\nfrom multiprocessing import Pool\nfor _ in range(5):\n"
        "    with Pool(2) as p:\n        squares = p.map(abs, range(3))\nsquares"
    )
    assert reply.lines() == ["[ranks 0-3] [0, 1, 2]"]
    assert time.monotonic() - began < 60


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
