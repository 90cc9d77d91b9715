"""`%distributed auto on`: plain cells on ranks."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from axon_nb.magics.input_transformers import Piece, split_cell
from tests.support.completion import completed, expect_completed, expect_help
from tests.support.kernel import Kernel

HEAD = "On ranks 0-3 (`%distributed auto on`; a `%%local` cell runs in the notebook):"


@pytest.fixture
def auto(kernel: Kernel) -> Iterator[Kernel]:
    kernel.ok("%distributed auto on")
    yield kernel
    kernel.ok("%distributed auto off")


def test_plain_cells_run_on_ranks_and_say_so(auto: Kernel) -> None:
    assert sorted(auto.ok("t_auto = rank * 2\nt_auto").lines()) == [HEAD, *(f"[rank {r}] {r * 2}" for r in range(4))]


def test_local_cells_run_in_the_notebook(auto: Kernel) -> None:
    reply = auto.ok("%%local\nt_here = 5\nt_here + 1")
    assert (reply.stdout, reply.result) == ("", "6")
    assert auto.ok("'t_here' in globals()").lines() == [HEAD, "[ranks 0-3] False"]
    assert "takes no options" in auto.run("%%local now\n1").traceback


def test_our_line_magics_stay_in_the_notebook(auto: Kernel) -> None:
    auto.ok("%%local\nt_pushed = 7")
    reply = auto.ok("%push t_pushed\nt_pushed + rank\n%pull t_pushed --ranks 1 --as t_back")
    assert sorted(reply.lines()) == [HEAD, *(f"[rank {r}] {r + 7}" for r in range(4))]
    assert auto.ok("%%local\nt_back").result == "7"
    assert HEAD not in auto.ok("%distributed config").stdout


def test_failure_names_the_line_of_the_cell(auto: Kernel) -> None:
    reply = auto.run("%distributed config warm_up=on\nx = 1\n\nraise ValueError(rank)")
    assert "----> 4" in reply.traceback or "line 4" in reply.traceback
    assert reply.ename == "CellError"


def test_await_and_other_cell_magics(auto: Kernel) -> None:
    assert auto.ok("import asyncio\nawait asyncio.sleep(0)\n'slept'").lines() == [HEAD, "[ranks 0-3] 'slept'"]
    auto.ok("%%capture t_said\nprint('x')")
    assert auto.ok("%%local\nt_said.stdout").result == "'x\\n'"


def test_scripts_run_by_the_notebook_stay_local(auto: Kernel, tmp_path: Path) -> None:
    script = tmp_path / "here.ipy"
    script.write_text("t_ran = 'in the notebook'\n", encoding="utf-8")
    auto.ok(f"%%local\n%run {script}")
    assert auto.ok("%%local\nt_ran").result == "'in the notebook'"


def test_hidden_requests_of_editors_stay_local(auto: Kernel) -> None:
    request = auto.client.execute("t_listed = 1\nprint('rank' in globals())", silent=False, store_history=False)
    assert auto.collect(request).stdout == "False\n"
    assert auto.ok("'t_listed' in globals()").lines() == [HEAD, "[ranks 0-3] False"]


def test_completions_and_help_come_from_ranks(auto: Kernel) -> None:
    auto.ok("t_of_ranks = {'deep': 1}")
    expect_completed(auto, "x = 1\nt_of_r", "t_of_ranks")
    expect_help(auto, "t_of_ranks", "dict")
    assert completed(auto, "%%local\nt_of_r") == []


def test_auto_mode_on_some_ranks_and_off(kernel: Kernel) -> None:
    assert "Plain cells run on ranks 1-2" in kernel.ok("%distributed auto on --ranks 1-2").stdout
    assert kernel.ok("print(rank)").lines()[0].startswith("On ranks 1-2")
    assert "Plain cells run in the notebook" in kernel.ok("%distributed auto off").stdout
    assert kernel.run("print(rank)").ename == "NameError"
    assert "invalid choice" in kernel.run("%distributed auto maybe").traceback


@pytest.mark.parametrize(
    ("body", "pieces"),
    [
        ("x = 1\n", [("", "x = 1\n")]),
        ("%push x --ranks 0\nx\n", [("push", "x --ranks 0"), ("", "#\nx\n")]),
        ("x = 1\n%push x\n# end\n", [("", "x = 1\n"), ("push", "x")]),
        ("x = '''\n%push x\n'''\n", [("", "x = '''\n%push x\n'''\n")]),
        ("for i in y:\n    i\n%push x\ny\n", [("", "for i in y:\n    i\n"), ("push", "x"), ("", "#\n#\n#\ny\n")]),
        ("%push?\n", [("pinfo", "%push")]),
        ("%timeit x\n", [("", "%timeit x\n")]),
    ],
)
def test_cells_are_split_at_our_magics(body: str, pieces: list[tuple[str, str]]) -> None:
    assert split_cell(body, {"push"}.__contains__) == [Piece(*piece) for piece in pieces]


def test_injected_parameters_follow_a_cell_for_ranks(kernel: Kernel) -> None:
    """Papermill adds such a cell below the one that is tagged."""
    kernel.ok("%%distributed --ranks 0-1\nlr, names = 0.1, []\nrate = 1")
    sent = kernel.ok("# Parameters\nlr = 0.5\nnames = ['a', None]\n")
    assert sent.stdout == "Sent lr, names to ranks 0-1, because the cell above sets parameters there.\n"
    assert kernel.value("lr") == 0.5
    assert kernel.ok("%%rank 0-1\nprint(lr, names, rate)").lines() == ["[ranks 0-1] 0.5 ['a', None] 1"]
    kernel.ok("%%rank 1\nlr = 0.2")
    assert kernel.ok("# Parameters\nother = 1").stdout == ""
    kernel.ok("%%rank 1\nlr == 0.2\nlr = 0.3")
    assert kernel.ok("# The rate\nlr = 0.6").stdout == ""
    assert kernel.ok("# Parameters\nlr = 0.7").stdout == ""
    assert kernel.ok("%%rank 0-1\nprint(lr)").lines() == ["[rank 0] 0.5", "[rank 1] 0.3"]
