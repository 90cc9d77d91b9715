"""Cells in a real kernel: what runs, where, and what is shown; `--time`, `--repeat` and `--profile`."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from axon_nb.magics.cells import duration, repeat_lines, time_lines
from tests.support.kernel import Kernel
from tests.support.processes import until


def test_cell_runs_on_every_rank_in_one_group(kernel: Kernel) -> None:
    reply = kernel.ok("%%distributed\nt = torch.ones(2) * rank\ndist.all_reduce(t)\nprint(rank, t.tolist())")
    assert sorted(reply.lines()) == [f"[rank {r}] {r} [6.0, 6.0]" for r in range(4)]


def test_identical_lines_are_shown_once(kernel: Kernel) -> None:
    # Those that come within a fraction of a second of each other, that is: a busy machine takes more than one cell.
    code = "%%distributed\nprint('hello')\nprint('world', world_size)"
    assert until(lambda: kernel.ok(code).stdout.splitlines() == ["[ranks 0-3] hello", "[ranks 0-3] world 4"])


def test_last_expression_is_shown(kernel: Kernel) -> None:
    assert kernel.ok("%%distributed\nworld_size * 10").lines() == ["[ranks 0-3] 40"]
    assert sorted(kernel.ok("%%distributed\nrank * 10").lines()) == [f"[rank {r}] {r * 10}" for r in range(4)]
    assert kernel.ok("%%distributed\nrank;").stdout == ""


@pytest.mark.parametrize(("spec", "ranks"), [("0", [0]), ("0,2-3", [0, 2, 3]), ("1:", [1, 2, 3]), ("-1", [3])])
def test_ranks_option_selects_ranks(kernel: Kernel, spec: str, ranks: list[int]) -> None:
    reply = kernel.ok(f"%%distributed --ranks {spec}\nprint('here', rank)")
    assert sorted(reply.lines()) == [f"[rank {r}] here {r}" for r in ranks]


def test_rank_magic_selects_ranks(kernel: Kernel) -> None:
    assert kernel.ok("%%rank 2\nprint('here', rank)").lines() == ["[rank 2] here 2"]


def test_names_and_environment_of_a_rank(kernel: Kernel) -> None:
    reply = kernel.ok(
        "%%distributed --ranks 3\n"
        "import os\n"
        "print(rank, local_rank, world_size, device, mesh, world.rank(), world.world_size())\n"
        "print(*[os.environ[n] for n in ('RANK', 'LOCAL_RANK', 'WORLD_SIZE', 'LOCAL_WORLD_SIZE', 'GROUP_RANK')])\n"
        "print('MASTER_ADDR' in os.environ, 'MASTER_PORT' in os.environ, type(rank).__name__)"
    )
    assert reply.lines() == ["[rank 3] 3 3 4 cpu None 3 4", "[rank 3] 3 3 4 4 0", "[rank 3] True True int"]


def test_await_shell_and_magic_lines(kernel: Kernel, tmp_path: Path) -> None:
    reply = kernel.ok(
        "%%distributed --ranks 0-1\nimport asyncio\nawait asyncio.sleep(0.01)\n"
        "!echo from the shell\n%who_ls nothing\n'end'"
    )
    assert "[ranks 0-1] from the shell" in reply.lines()
    assert "[ranks 0-1] 'end'" in reply.lines()


def test_name_that_torch_has_deprecated_is_noted_once_with_what_to_use(kernel: Kernel) -> None:
    unused = "%%distributed --ranks 0\n# not FullyShardedDataParallel\nif False:\n    {}"
    imports = "from torch.distributed import _tensor, _shard\n    from torch.distributed._tensor import DTensor"
    reply = kernel.ok(unused.format(imports))
    assert reply.stderr.splitlines() == [
        "torch has deprecated `torch.distributed._tensor`: use `torch.distributed.tensor`."
    ]
    reply = kernel.ok(unused.format(f"{imports}\n    FullyShardedDataParallel(model)"))
    assert reply.stderr.splitlines() == [
        "torch has deprecated `FullyShardedDataParallel`: use `torch.distributed.fsdp.fully_shard`."
    ]


def test_syntax_error_is_reported_before_ranks_run(kernel: Kernel) -> None:
    kernel.ok("%%distributed\ncount = 0")
    reply = kernel.run("%%distributed\ncount += 1\ndef broken(:\n    pass")
    assert not reply.ok
    assert "line 3" in reply.traceback
    assert "SyntaxError" in reply.traceback
    assert "No rank has run the cell." in reply.traceback
    assert kernel.ok("%%distributed\ncount").lines() == ["[ranks 0-3] 0"]


def test_out_binds_the_result(kernel: Kernel) -> None:
    kernel.ok("%%distributed --out t_result --quiet\nprint('unseen')\n{'rank': rank}")
    assert kernel.value("dict(t_result.values)") == {r: {"rank": r} for r in range(4)}
    assert kernel.value("t_result.ok, sorted(t_result.seconds), t_result.text[1]") == (True, [0, 1, 2, 3], "unseen\n")


def test_local_runs_in_the_notebook_too(kernel: Kernel) -> None:
    kernel.ok("%%distributed --local\nt_where = 'here'")
    assert kernel.value("t_where") == "here"
    assert kernel.ok("%%distributed\nt_where").lines() == ["[ranks 0-3] 'here'"]


def test_quiet_shows_nothing(kernel: Kernel) -> None:
    reply = kernel.ok("%%distributed --quiet\nprint('x')\nrank")
    assert (reply.stdout, reply.stderr, reply.displays) == ("", "", [])


def test_noblock_returns_a_handle(kernel: Kernel, tmp_path: Path) -> None:
    flag = tmp_path / "flag"
    wait = f"import os, time\nwhile not os.path.exists({str(flag)!r}): time.sleep(0.01)"
    kernel.ok(f"%%distributed --noblock --out t_handle\n{wait}\nrank")
    assert kernel.value("t_handle.done()") is False
    flag.touch()
    assert kernel.value("dict(t_handle.result(100).values)") == {0: 0, 1: 1, 2: 2, 3: 3}
    assert kernel.value("t_handle.done()") is True


def test_cell_sent_while_another_is_cancelled_runs(kernel: Kernel) -> None:
    endless = "import time\nwhile rank == 3: time.sleep(0.001)\ndist.all_reduce(torch.ones(1))"
    for _ in range(2):
        kernel.ok(f"%%distributed --noblock --out t_handle\n{endless}")
        kernel.ok("%distributed cancel")
        added = "t = torch.ones(1)\nfor _ in range(500): dist.all_reduce(t, dist.ReduceOp.MAX)\nt.item()"
        assert kernel.ok(f"%%distributed\n{added}").lines() == ["[ranks 0-3] 1.0"]
        assert kernel.run("t_handle.result(100)").ename == "CellInterrupt"


def test_cell_queued_behind_one_that_fails_does_not_run(kernel: Kernel, tmp_path: Path) -> None:
    flag = tmp_path / "flag"
    kernel.ok("%%distributed\nimport os, time\nt_ran = 0")
    wait = f"while rank == 3 and not os.path.exists({str(flag)!r}): time.sleep(0.01)"
    kernel.ok(
        f"%%distributed --noblock --out t_first\n{wait}\nif rank == 3: raise ValueError('no')\n"
        "dist.all_reduce(torch.ones(1))"
    )
    kernel.ok("%%distributed --noblock --out t_second\nt_ran += 1\nfor _ in range(5): dist.all_reduce(torch.ones(1))")
    flag.touch()
    assert "rank 3: ValueError: no" in kernel.run("t_first.result(100)").evalue
    second = kernel.run("t_second.result(100)").evalue
    assert "not run, because the cell that it was queued behind did not finish here" in second
    assert kernel.ok("%%distributed\n(t_ran if rank == 3 else 0)").lines() == ["[ranks 0-3] 0"]
    assert kernel.ok("%%distributed\ndist.all_reduce(t := torch.ones(1))\nt.item()").lines() == ["[ranks 0-3] 4.0"]


def test_output_of_a_noblock_cell_goes_to_its_own_cell(kernel: Kernel) -> None:
    request = kernel.submit("%%distributed --noblock --out t_handle\nimport time\ntime.sleep(0.5)\nprint('late')")
    first = kernel.collect(request)
    second = kernel.ok("_ = t_handle.result(100)\nprint('waited')")
    assert "late" not in second.stdout
    assert first.ok


def test_timeout_ends_the_cell(kernel: Kernel) -> None:
    reply = kernel.run("%%distributed --timeout 1\nimport time\ntime.sleep(600)")
    assert reply.ename == "CellTimeoutError"
    assert "timed out after 1 s (--timeout)" in reply.traceback
    assert kernel.ok("%%distributed\n'alive'").lines() == ["[ranks 0-3] 'alive'"]


def test_awaited_cell_does_not_block_the_event_loop(kernel: Kernel, tmp_path: Path) -> None:
    begun, flag = tmp_path / "begun", tmp_path / "flag"
    # The ranks wait for a task of the notebook, and that for the ranks to run: it needs the event loop meanwhile.
    kernel.ok(
        "import asyncio, pathlib\nasync def t_tick():\n"
        f"    while not pathlib.Path({str(begun)!r}).exists(): await asyncio.sleep(0.01)\n"
        f"    for _ in range(10): await asyncio.sleep(0.01)\n    pathlib.Path({str(flag)!r}).touch()\n"
        "t_task = asyncio.ensure_future(t_tick())"
    )
    kernel.ok(
        f"%%distributed\nimport pathlib, time\npathlib.Path({str(begun)!r}).touch()\n"
        f"while not pathlib.Path({str(flag)!r}).exists(): time.sleep(0.01)"
    )


def test_run_cell_magic_blocks(kernel: Kernel) -> None:
    reply = kernel.ok("get_ipython().run_cell_magic('distributed', '--ranks 1', 'print(rank)\\n')")
    assert reply.lines() == ["[rank 1] 1"]


def test_comment_only_cell_is_reported(kernel: Kernel) -> None:
    reply = kernel.ok("%%distributed\n# later\n")
    assert reply.lines() == ["Nothing to run: put code for the ranks below the %%distributed line."]


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


def test_options_of_torch_hold_in_the_next_cells(kernel: Kernel) -> None:
    kernel.ok("%%distributed\nimport torch.distributed.config as options\noptions.use_torchcomms = rank == 1")
    try:
        assert kernel.ok("%%distributed\noptions.use_torchcomms").lines() == ["[ranks 0,2-3] False", "[rank 1] True"]
    finally:
        kernel.ok("%%distributed\noptions.use_torchcomms = False")


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
