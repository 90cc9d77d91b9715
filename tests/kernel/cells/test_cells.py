"""`%%distributed` cells in a real kernel: what runs, where, and what is shown."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.kernel import FreshCluster, Kernel
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


def test_variables_persist_between_cells(kernel: Kernel) -> None:
    kernel.ok("%%distributed\nkept = rank + 100")
    assert sorted(kernel.ok("%%distributed\nkept").lines()) == [f"[rank {r}] {r + 100}" for r in range(4)]


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


def test_noblock_can_be_cancelled(kernel: Kernel) -> None:
    kernel.ok("%%distributed --noblock --out t_handle\nimport time\ntime.sleep(600)")
    kernel.ok("t_handle.cancel()")
    reply = kernel.run("t_handle.result(100)")
    assert reply.ename == "CellInterrupt"
    assert kernel.ok("%%distributed\n'alive'").lines() == ["[ranks 0-3] 'alive'"]


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


def test_ranks_without_a_seed_differ(fresh_cluster: FreshCluster) -> None:
    kernel = fresh_cluster(4)  # on shared ranks, another test may have set seeds
    draw = "(random.random(), numpy.random.rand(), torch.initial_seed())"
    kernel.ok(f"%%distributed --out t_draws --quiet\nimport random, numpy\n{draw}")
    draws = kernel.value("list(t_draws.values.values())")
    assert len({d[0] for d in draws}) == len({d[1] for d in draws}) == 4
    assert len({d[2] for d in draws}) == 4
