"""What a cell does in the notebook and on a rank: the rows of docs/differences.md."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.kernel import Kernel, Reply

PAGE = Path(__file__).resolve().parents[3] / "docs" / "differences.md"


def without_label(text: str) -> str:
    """The text of one rank, without labels and indentation."""
    return "\n".join(re.sub(r"^\[rank 1\] ?", "", line).strip() for line in text.splitlines()).strip()


def text_of(reply: Reply) -> str:
    """What a cell printed or gave back."""
    return "\n".join(filter(None, [without_label(reply.stdout), reply.result])).replace("\r", "").strip()


SAME = {
    "values and semicolons": ["2 + 3", "2 + 3;"],
    "`await`": ["import asyncio\nprint(await asyncio.sleep(0.01, 'slept'))"],
    "shell commands": ["!echo shell", "word = 'said'\n!echo $word", "lines = !echo kept\nprint(lines)"],
    "working directory and environment": ["import os\nprint(os.getcwd())", "%env DIFFERENCE=5"],
    "`__main__`": [
        "print(__name__)",
        "import pickle\nclass Kept: pass\nprint(type(pickle.loads(pickle.dumps(Kept()))) is Kept)",
        "import inspect\ndef source():\n    return 1\nprint(inspect.getsource(source))",
    ],
    "errors in threads": [
        "import threading\nthread = threading.Thread(target=lambda: 1 / 0)\nthread.start()\nthread.join()\nprint('on')"
    ],
    "forked children": [
        (
            "from multiprocessing import Process\nchild = Process(target=print, args=('child',))\n"
            "child.start()\nchild.join()\nprint(child.exitcode)"
        )
    ],
    "signals": [
        (
            "import signal\nhits = []\nbefore = signal.signal(signal.SIGUSR1, lambda *_: hits.append(1))\n"
            "signal.raise_signal(signal.SIGUSR1)\n_ = signal.signal(signal.SIGUSR1, before)\nprint(hits)"
        )
    ],
    "cell magics": ["%%capture captured\nprint('hidden')", "%%bash\necho from bash"],
}

IN_OTHER_FILES = {
    "warnings and logging": "test_output.py",
    "exit handlers": "test_processes.py",
    "widgets and `tqdm.auto`": "test_output.py",
    "`clear_output`": "test_output.py",
    "output between cells": "test_output.py",
    "`mp.spawn`, `destroy_process_group()`": "test_processes.py",
    "`%run` and `run_cell` that fail": "test_script_runs.py",
}
"""Rows whose test needs more than one cell."""

DIFFERENT: dict[str, tuple[str, Callable[[Reply], object], Callable[[Reply], object]]] = {
    "`input()`, `breakpoint()`": (
        "input('name')",
        lambda plain: plain.ename == "StdinNotImplementedError" or plain.ok,
        lambda rank: "StdinNotImplementedError" in rank.traceback,
    ),
    "`%tb`": ("%tb", lambda plain: True, lambda rank: "No traceback available" in rank.stderr),
    "`exit()`": (
        "raise SystemExit(3)",
        lambda plain: plain.ename == "SystemExit",
        lambda rank: "the rank keeps running with its state" in rank.traceback,
    ),
    "files of cells": (
        "print((lambda: 0).__code__.co_filename)",
        lambda plain: "ipykernel_" in plain.stdout,
        lambda rank: re.search(r"\[rank 1\] <ipython-input-\d+-\w+>$", rank.stdout.strip()),
    ),
    "`sys.argv`": (
        "import sys\nprint(len(sys.argv))",
        lambda plain: plain.stdout.strip() != "1",
        lambda rank: rank.stdout.strip() == "[rank 1] 1",
    ),
    "`sys.ps1`": (
        "import sys\nprint(hasattr(sys, 'ps1'))",
        lambda plain: plain.stdout.strip() == "True",
        lambda rank: rank.stdout.strip() == "[rank 1] False",
    ),
    "`%history`": (
        "%history -l 1",
        lambda plain: plain.stdout.strip(),
        lambda rank: not rank.stdout.strip(),
    ),
}


def rows(heading: str) -> list[str]:
    """The first column of a table of the page."""
    section = PAGE.read_text(encoding="utf-8").partition(f"## {heading}\n")[2].partition("\n## ")[0]
    return [line.split("|")[1].strip() for line in section.splitlines() if line.startswith("| ")][1:]


def test_every_difference_has_a_test() -> None:
    assert set(rows("The same")) - set(IN_OTHER_FILES) == set(SAME)
    assert set(rows("Different on purpose")) - set(IN_OTHER_FILES) - ELSEWHERE == set(DIFFERENT)
    for name in IN_OTHER_FILES.values():
        assert (Path(__file__).parent / name).exists()


ELSEWHERE = {"a handler that raises between cells", "random numbers without a seed"}
"""Rows that the tests below are about: they start a cluster."""


@pytest.mark.parametrize("row", SAME)
def test_rank_behaves_as_the_notebook(kernel: Kernel, row: str) -> None:
    for code in SAME[row]:
        plain, rank = kernel.ok(code), kernel.ok(f"%%rank 1\n{code}")
        assert text_of(plain) == text_of(rank)


@pytest.mark.parametrize("row", DIFFERENT)
def test_rank_differs_as_documented(kernel: Kernel, row: str) -> None:
    code, in_notebook, on_rank = DIFFERENT[row]
    if row != "`input()`, `breakpoint()`":  # the test's front end could not answer
        assert in_notebook(kernel.run(code))
    assert on_rank(kernel.run(f"%%rank 1\n{code}"))


def test_unseeded_ranks_draw_different_numbers(fresh_cluster: Callable[[int], Kernel]) -> None:
    kernel = fresh_cluster(2)
    draws = "import random\nimport numpy\nprint(torch.rand(1).item(), numpy.random.rand(), random.random())"
    lines = kernel.ok(f"%%distributed\n{draws}").lines()
    first, second = (line.partition("] ")[2].split() for line in lines)
    assert all(one != other for one, other in zip(first, second, strict=True))


def test_raising_handler_between_cells_is_reported(fresh_cluster: Callable[[int], Kernel]) -> None:
    kernel = fresh_cluster(2)
    kernel.ok(
        "%%rank 1\nimport signal\ndef late(*_):\n    raise TimeoutError('late')\n"
        "_ = signal.signal(signal.SIGALRM, late)\n_ = signal.setitimer(signal.ITIMER_REAL, 0.3)"
    )
    kernel.ok("import time; time.sleep(1.5)")
    reply = kernel.ok("%%rank 1\nprint(late is signal.getsignal(signal.SIGALRM))")
    assert "The handler of SIGALRM raised between cells: TimeoutError('late')" in reply.stderr
    assert text_of(reply) == "True"
    caught = "try: signal.pause()\nexcept TimeoutError as error: print('caught', error)"
    assert "caught late" in text_of(kernel.ok(f"%%rank 1\n_ = signal.setitimer(signal.ITIMER_REAL, 0.1)\n{caught}"))


def test_fatal_signal_of_a_rank_is_reported(fresh_cluster: Callable[[int], Kernel]) -> None:
    kernel = fresh_cluster(2)
    kernel.ok("%%rank 0\nimport signal\n_ = signal.setitimer(signal.ITIMER_REAL, 0.3)")
    reply = kernel.run("%%distributed\nimport time; time.sleep(60)")
    assert "killed by SIGALRM" in reply.traceback


def test_aggressive_reset_forgets_what_cells_imported() -> None:
    with Kernel() as kernel:
        kernel.ok("%load_ext axon_nb")
        kernel.ok("%distributed start -n 2")
        kernel.ok("%%distributed\nimport imaplib")
        kernel.ok("%%distributed\n%reset --aggressive -f")
        reply = kernel.ok(
            "%%distributed\nimport sys\nt = torch.ones(1)\ndist.all_reduce(t)\n'imaplib' in sys.modules, t.item()"
        )
        assert "[ranks 0-1] (False, 2.0)" in reply.lines()
        kernel.run("%distributed stop")
