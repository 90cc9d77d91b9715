"""`%distributed run`: a script runs on the live ranks as under torchrun, and its variables stay."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.kernel import Kernel

WORKS = "%%distributed\nt = torch.ones(1); dist.all_reduce(t); t.item()"
SCRIPT = """\
import os
import sys

import torch
import torch.distributed as dist
from beside_script_run import FACTOR


class Net(torch.nn.Module):
    pass


def main():
    dist.init_process_group("gloo")
    dist.init_process_group("gloo")
    total = torch.ones(1) * FACTOR
    dist.all_reduce(total)
    dist.destroy_process_group()
    return total.item()


if __name__ == "__main__":
    facts = sys.argv[1:], os.path.basename(__file__), os.getcwd()
    total = main()
    sys.exit(0)
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    """A script that imports a file beside it."""
    (tmp_path / "beside_script_run.py").write_text("FACTOR = 3\n")
    path = tmp_path / "whole.py"
    path.write_text(SCRIPT)
    return path


@pytest.mark.parametrize("before", ["", "t_first = 1\n"], ids=["alone", "below another line"])
def test_script_runs_as_under_torchrun_and_leaves_its_variables(kernel: Kernel, script: Path, before: str) -> None:
    kernel.ok("t_words = 'from the notebook'")
    reply = kernel.ok(f"{before}%distributed run {script} --x 'a b' \"{{t_words}}\"")
    assert "SystemExit" not in reply.stdout + reply.stderr
    (line,) = kernel.ok("%%distributed\nprint(facts, total, Net.__module__, __name__)").lines()
    where = kernel.value("__import__('os').getcwd()")
    words = ["--x", "a b", "from the notebook"]
    assert line == f"[ranks 0-3] {(words, 'whole.py', where)} 12.0 __main__ __main__"
    assert kernel.ok(WORKS).lines() == ["[ranks 0-3] 4.0"]


def test_failure_names_the_line_of_the_script(kernel: Kernel, tmp_path: Path) -> None:
    script = tmp_path / "fails.py"
    script.write_text(
        "import torch\nimport torch.distributed as dist\nt_reached = dist.get_rank()\nif t_reached == 1:\n"
        "    raise ValueError('no data')\ndist.all_reduce(torch.ones(1))\n"
    )
    reply = kernel.run(f"%distributed run {script}")
    assert reply.ename == "CellError"
    assert "[rank 1]\nValueError: no data" in reply.traceback
    assert "[ranks 0,2-3] waited in all_reduce at line 1 (fails.py line 6)" in reply.traceback
    assert "fails.py:5" in reply.stderr
    assert kernel.ok("%%rank 1-2\nt_reached").lines() == ["[rank 1] 1", "[rank 2] 2"]


@pytest.mark.parametrize("status", ["3", "'no space left'"])
def test_exit_status_other_than_0_fails_the_cell_and_is_reported(kernel: Kernel, tmp_path: Path, status: str) -> None:
    script = tmp_path / "leaves.py"
    script.write_text(f"t_left = 7\nimport sys\nsys.exit({status})\n")
    reply = kernel.run(f"%distributed run {script}")
    assert reply.ename == "CellError"
    assert f"[ranks 0-3]\nSystemExit at line 1 (leaves.py line 3): sys.exit({status})\n" in reply.traceback
    assert "%tb" not in reply.stdout + reply.stderr
    assert kernel.ok("%%distributed\nt_left").lines() == ["[ranks 0-3] 7"]


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("t_missing.py", "t_missing.py does not exist."),
        ("train.sh", "'train.sh' is not a Python script; its name must end in .py."),
        ("'train.py", "No closing quotation"),
    ],
)
def test_bad_input_gets_one_sentence(kernel: Kernel, words: str, sentence: str) -> None:
    reply = kernel.run(f"%distributed run {words}")
    assert reply.ename == "UsageError"
    assert sentence in reply.traceback


def test_it_runs_in_auto_mode_too(kernel: Kernel, script: Path) -> None:
    kernel.ok("%distributed auto on")
    try:
        kernel.ok(f"%distributed run {script} auto")
        assert kernel.ok("%%distributed\nprint(facts[0])").lines() == ["[ranks 0-3] ['auto']"]
    finally:
        kernel.ok("%distributed auto off")
