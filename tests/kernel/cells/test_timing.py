"""`--time`, `--repeat` and `--profile`."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from axon_nb.magics.cells import duration, repeat_lines, time_lines
from tests.support.kernel import Kernel


def test_time_reports_wall_and_cpu_per_rank_and_the_slowest(kernel: Kernel) -> None:
    reply = kernel.ok("%%distributed --time --out t_timed\nimport time\ntime.sleep(0.5 if rank == 2 else 0)")
    *ranks, slowest = reply.lines()
    assert [line.split(":")[0] for line in ranks] == [f"rank {r}" for r in range(4)]
    assert all(re.fullmatch(r"rank \d: \S+ \S+ wall, \S+ \S+ CPU", line) for line in ranks)
    longest = kernel.value("max(t_timed.seconds, key=t_timed.seconds.get)")
    assert slowest.startswith(f"slowest: rank {longest}, ")
    assert kernel.value("t_timed.seconds[2] >= 0.5, sorted(t_timed.cpu_seconds)") == (True, [0, 1, 2, 3])


def test_repeat_runs_the_cell_n_times_in_step(kernel: Kernel) -> None:
    kernel.ok("%%distributed\nt_count, t_ahead = 0, []\nt_names = {n for n in globals() if 'axon_nb' in n}")
    reply = kernel.ok(
        "%%distributed --repeat 5 --out t_repeated\n"
        "import time\n"
        "t_count += 1\n"
        "t_ahead.append(time.monotonic_ns())\n"
        "time.sleep(0.05 * (rank == 1))\n"
        "t_count"
    )
    *ranks, slowest = reply.lines()
    assert len(ranks) == 4
    assert all(re.fullmatch(r"rank \d: \S+ \S+ ± \S+ \S+ \(mean ± std. dev. of 5 runs\), best .+", r) for r in ranks)
    longest = kernel.value("max(t_repeated.repetitions, key=lambda r: sum(t_repeated.repetitions[r]))")
    assert slowest.startswith(f"slowest: rank {longest}, ")
    assert kernel.value("{r: len(s) for r, s in t_repeated.repetitions.items()}") == dict.fromkeys(range(4), 5)
    assert kernel.ok("%%distributed\nt_count").lines() == ["[ranks 0-3] 5"]
    # No rank begins a run before all have ended the one before.
    kernel.ok("%%distributed --out t_moments --quiet\nt_ahead")
    moments = kernel.value("dict(t_moments.values)")
    assert all(max(moments[r][i] for r in moments) < min(moments[r][i + 1] for r in moments) for i in range(4))
    added = kernel.ok("%%distributed\n{n for n in globals() if 'axon_nb' in n} - t_names")
    assert added.lines() == ["[ranks 0-3] set()"]


def test_failure_in_a_repeated_cell_names_its_line(kernel: Kernel) -> None:
    reply = kernel.run("%%distributed --repeat 3 --ranks 0,2\nx = 1\nraise ValueError('third line')")
    assert "third line" in reply.traceback
    assert "----> 3" in reply.traceback
    assert kernel.ok("%%distributed --repeat 2\nawait __import__('asyncio').sleep(0)").ok


def test_profile_writes_table_and_trace_per_rank(kernel: Kernel, tmp_path: Path) -> None:
    kernel.ok(f"import os\nt_folder = os.getcwd()\nos.chdir({str(tmp_path)!r})")
    reply = kernel.ok("%%distributed --profile 1,3 --time\na = torch.ones(64, 64)\nfor _ in range(3):\n    a @ a")
    kernel.ok("os.chdir(t_folder)")
    assert "USDT" not in reply.stdout + reply.stderr
    assert "aten::mm" in reply.displays[0]["text/plain"] + reply.displays[0]["text/html"]
    traces = sorted(tmp_path.glob("axon_profiles/cell-*/*.pt.trace.json"))
    assert [path.name.partition(".")[0] for path in traces] == ["rank1", "rank3"]
    assert all(f"rank {rank}: {path}" in reply.lines() for rank, path in zip((1, 3), traces, strict=True))
    names = {event.get("name") for event in json.loads(traces[0].read_text(encoding="utf-8"))["traceEvents"]}
    assert "aten::mm" in names
    assert f"tensorboard --logdir {traces[0].parent}" in reply.stdout
    assert "slowest: rank" in reply.stdout


def test_unwritable_profile_fails_the_cell(kernel: Kernel, tmp_path: Path) -> None:
    (tmp_path / "axon_profiles").touch()  # no folder
    kernel.ok(f"import os\nt_folder = os.getcwd()\nos.chdir({str(tmp_path)!r})")
    reply = kernel.run("%%distributed --profile 2\nt_done = 1")
    kernel.ok("os.chdir(t_folder)")
    assert "the cell ran, but measuring it failed" in reply.traceback
    assert kernel.ok("%%distributed\nt_done").lines() == ["[ranks 0-3] 1"]


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ("--repeat 0", "must be a number of runs above 0"),
        ("--repeat many", "must be a number of runs above 0"),
        ("--profile 3 --ranks 0-2", "rank 3"),
    ],
)
def test_bad_input(kernel: Kernel, options: str, sentence: str) -> None:
    reply = kernel.run(f"%%distributed {options}\n1")
    assert reply.ename == "UsageError"
    assert sentence in reply.traceback


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(2.5, "2.5 s"), (0.0123, "12.3 ms"), (4.2e-5, "42 µs"), (3e-8, "30 ns"), (4321.0, "4321 s"), (0.0, "0 ns")],
)
def test_durations(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_lines_of_one_rank_name_no_slowest() -> None:
    assert time_lines({0: 1.5}, {0: 1.0}) == ["rank 0: 1.5 s wall, 1 s CPU"]
    assert repeat_lines({0: [1.0, 3.0]}) == ["rank 0: 2 s ± 1 s (mean ± std. dev. of 2 runs), best 1 s"]


def test_slowest_rank_is_compared_with_the_median() -> None:
    assert time_lines({0: 1.0, 1: 4.0, 2: 2.0, 3: 3.0}, {})[-1] == (
        "slowest: rank 1, 2 s more than the median of the others"
    )
