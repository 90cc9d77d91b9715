"""Cell magics of IPython above and below ours do what they say."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.kernel import Kernel

ABOVE = {
    "%%time": "Wall time:",
    "%%timeit -n 2 -r 1": "per loop",
    "%%prun -q": "",
}
BELOW = {
    "%%time\nprint('ran')": ["ran", "Wall time:"],
    "%%timeit -n 1 -r 1\nprint('ran')": ["ran", "per loop"],
    "%%prun -q\nprint('ran')": ["ran"],
    "%%bash\necho ran": ["ran"],
    "%%script bash\necho ran": ["ran"],
    "\n%%python\nprint('ran')": ["ran"],
}


@pytest.mark.parametrize("magic", ABOVE)
def test_cell_magic_above(kernel: Kernel, magic: str) -> None:
    reply = kernel.ok(f"{magic}\n%%rank 1\nprint('ran')")
    assert "[rank 1] ran" in reply.stdout
    assert ABOVE[magic] in reply.stdout


def test_capture_above_captures_what_all_ranks_print(kernel: Kernel) -> None:
    assert kernel.ok("%%capture captured\n%%rank 2\nprint('ran')").stdout == ""
    assert kernel.ok("print(captured.stdout)").stdout == "[rank 2] ran\n\n"


@pytest.mark.parametrize("cell", BELOW, ids=lambda cell: cell.split()[0])
def test_cell_magic_below(kernel: Kernel, cell: str) -> None:
    reply = kernel.ok(f"%%rank 1\n{cell}")
    for text in BELOW[cell]:
        assert text in reply.stdout


def test_capture_below_captures_on_each_rank(kernel: Kernel) -> None:
    assert kernel.ok("%%distributed\n%%capture captured\nprint('ran on', rank)").stdout == ""
    assert kernel.ok("%%rank 2\ncaptured.stdout").lines() == ["[rank 2] 'ran on 2\\n'"]


def test_writefile_below_writes_on_the_rank(kernel: Kernel, tmp_path: Path) -> None:
    kernel.ok(f"%%rank 3\n%%writefile {tmp_path / 'written.txt'}\nfrom rank 3")
    assert (tmp_path / "written.txt").read_text() == "from rank 3\n"


def test_error_below_another_magic_fails_the_cell(kernel: Kernel) -> None:
    reply = kernel.run("%%distributed\n%%time\nif rank == 2:\n    1/0\ndist.all_reduce(torch.ones(1))")
    assert reply.ename == "CellError"
    assert "ZeroDivisionError" in reply.traceback
    kernel.ok("%%distributed\ndist.all_reduce(torch.ones(1))")


def test_two_rank_selections_are_rejected(kernel: Kernel) -> None:
    reply = kernel.run("%%distributed\n%%rank 0\nprint('ran')")
    assert reply.evalue == "The cell has two lines that choose ranks, %%distributed and %%rank: keep one."
    assert "ran" not in reply.stdout
