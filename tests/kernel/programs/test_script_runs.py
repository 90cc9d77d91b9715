"""Scripts, magics and nested cells in programs; what their errors say and advise; and their export."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from tests.support.kernel import FreshCluster, Kernel, Reply

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

ONLY_HERE = {
    "a_value = 5": "Only the notebook has `a_value`: `%push a_value` sends it to the ranks.",
    "def a_function(): pass": "run its definition in a `%%distributed` cell, or `%push a_function`.",
    "import colorsys as a_module": "Only the notebook has imported `a_module`: import it in a `%%distributed` cell.",
}


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


@pytest.mark.parametrize("magic", ABOVE)
def test_cell_magic_above(kernel: Kernel, magic: str) -> None:
    reply = kernel.ok(f"{magic}\n%%rank 1\nprint('ran')")
    assert "[rank 1] ran" in reply.stdout
    assert ABOVE[magic] in reply.stdout


def test_capture_above_captures_what_all_ranks_print(kernel: Kernel) -> None:
    cell = "from IPython.display import HTML, display\nprint('ran')\ndisplay(HTML('<b>x</b>'))"
    reply = kernel.ok(f"%%capture captured\n%%rank 2\n{cell}")
    assert (reply.stdout, reply.displays) == ("", [])
    assert kernel.ok("print(captured.stdout)").stdout == "[rank 2] ran\n[rank 2]\n\n"
    assert kernel.value("len(captured.outputs)") == 1


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


def shown(reply: Reply) -> str:
    """What the cell wrote to stderr, without colours."""
    return re.sub(r"\x1b\[[0-9;]*m", "", reply.stderr)


def test_script_failing_on_one_rank_is_the_cause(kernel: Kernel, tmp_path: Path) -> None:
    script = tmp_path / "bad.py"
    script.write_text("if dist.get_rank() == 1:\n    raise ValueError('no data')\ndist.all_reduce(torch.ones(1))\n")
    reply = kernel.run(f"%%distributed\n%run -i {script}")
    assert reply.ename == "CellError"
    assert "[rank 1]\nValueError: no data" in reply.traceback
    assert "[ranks 0,2-3] waited in all_reduce at line 2 (bad.py line 3)" in reply.traceback
    assert "[rank 1]" in shown(reply)
    assert "no data" in shown(reply)
    assert "bad.py" in shown(reply)
    assert kernel.ok(WORKS).lines() == ["[ranks 0-3] 4.0"]


def test_script_failing_on_the_only_rank_fails_the_cell(kernel: Kernel, tmp_path: Path) -> None:
    script = tmp_path / "alone.py"
    script.write_text("print('begins')\n1/0\n")
    reply = kernel.run(f"%%distributed --ranks 2\n%run {script}\nprint('goes on')")
    assert reply.ename == "CellError"
    assert "ZeroDivisionError: division by zero" in shown(reply)
    assert "ZeroDivisionError: division by zero" in reply.traceback
    assert reply.lines() == ["[rank 2] begins", "[rank 2] goes on"]


def test_failing_nested_cell(kernel: Kernel) -> None:
    reply = kernel.run("%%distributed\nr = get_ipython().run_cell('1/0')\nprint('goes on')")
    assert reply.ename == "CellError"
    assert "ZeroDivisionError: division by zero" in shown(reply)
    assert reply.lines() == ["[ranks 0-3] goes on"]
    assert kernel.ok(WORKS).lines() == ["[ranks 0-3] 4.0"]


def test_error_of_the_cell_is_shown_as_well(kernel: Kernel) -> None:
    reply = kernel.run("%%rank 0\nr = get_ipython().run_cell('1/0')\nraise KeyError('its own')")
    assert "ZeroDivisionError" in shown(reply)
    assert "KeyError: 'its own'" in reply.traceback
    assert "ZeroDivisionError" not in reply.traceback


def test_failing_callback_is_reported_without_our_metadata(kernel: Kernel) -> None:
    kernel.ok(
        "%%rank 1\ndef failing(*args): raise OSError('disk')\nget_ipython().events.register('pre_run_cell', failing)"
    )
    try:
        reply = kernel.run("%%rank 1\n5")
        assert reply.ename == "CellError"
        assert "Error in the callback failing of IPython's event pre_run_cell:" in shown(reply)
        assert "OSError: disk" in shown(reply)
        everything = reply.stdout + reply.stderr + reply.traceback
        assert "cell_meta" not in everything
        assert "axon_nb'" not in everything
    finally:
        kernel.run("%%rank 1\nget_ipython().events.unregister('pre_run_cell', failing)")
    assert kernel.ok("%%rank 1\n5").lines() == ["[rank 1] 5"]


def test_interrupted_script_is_an_interrupt(kernel: Kernel, tmp_path: Path) -> None:
    script = tmp_path / "long.py"
    script.write_text("print('go', flush=True)\nimport time\ntime.sleep(600)\n")
    request = kernel.submit(f"%%distributed\n%run {script}")
    kernel.wait_for_output(request, "go", ranks=range(4))
    kernel.interrupt()
    assert kernel.collect(request).ename in ("CellInterrupt", "KeyboardInterrupt")
    assert kernel.ok(WORKS).lines() == ["[ranks 0-3] 4.0"]


def test_logged_abort_shows_where_the_cell_waited_without_our_frames(kernel: Kernel) -> None:
    reply = kernel.run(
        "%%distributed\nimport logging\nlogging.lastResort = None\n"
        "t_log = logging.getLogger('t_log')\nt_log.addHandler(logging.StreamHandler())\nt_log.propagate = False\n"
        "try:\n    if rank == 1:\n        1 / 0\n    dist.all_reduce(torch.ones(1))\n"
        "except KeyboardInterrupt:\n    t_log.exception('trial failed')\n    raise"
    )
    kernel.ok("%%distributed\nlogging.lastResort = logging._StderrHandler(logging.WARNING)\nt_log.handlers.clear()")
    assert "ZeroDivisionError: division by zero" in reply.traceback
    logged = reply.stderr.splitlines()
    (first,) = [number for number, line in enumerate(logged) if line.endswith("trial failed")]
    assert any("dist.all_reduce(torch.ones(1))" in line for line in logged[first:])
    assert logged[-1].endswith("KeyboardInterrupt")
    assert [line for line in logged if f"{os.sep}axon_nb{os.sep}" in line and "recoverable.py" not in line] == []


@pytest.mark.parametrize("code", ONLY_HERE)
def test_notebook_only_name_gets_a_push_hint(kernel: Kernel, code: str) -> None:
    kernel.ok(code)
    name = next(word for word in code.replace("(", " ").split() if word.startswith("a_"))
    assert ONLY_HERE[code] in kernel.run(f"%%distributed\n{name}").traceback
    assert "Only the notebook" not in kernel.run(f"%%distributed\n{name}_of_nobody").traceback


def test_pulled_call_that_communicates_with_other_ranks(kernel: Kernel) -> None:
    kernel.ok("%%distributed\ndef total():\n    t = torch.ones(1)\n    dist.all_reduce(t)\n    return t.item()")
    reply = kernel.run("%pull total() --ranks 0 --as summed")
    assert "rank 0 waited in all_reduce at line 1 (total, Cell In[" in reply.evalue
    assert "'total()' communicates with ranks that do not run it: leave --ranks out" in reply.traceback
    kernel.ok("%pull total() --as summed")
    assert kernel.value("summed") == dict.fromkeys(range(4), 4.0)


def test_variables_of_a_launcher_set_by_a_pasted_recipe(kernel: Kernel) -> None:
    recipe = "import os\nos.environ.update(RANK='0', LOCAL_RANK='0', WORLD_SIZE='1')"
    printed = kernel.ok(f"%%distributed --ranks 0-1\n{recipe}").stdout
    assert "[rank 0] axon_nb: the cell has set WORLD_SIZE=1, which misleads libraries" in printed
    assert "[rank 1] axon_nb: the cell has set RANK=0, LOCAL_RANK=0, WORLD_SIZE=1, which" in printed
    assert kernel.ok("%%distributed --ranks 0-1\nos.environ['RANK']").lines() == ["[ranks 0-1] '0'"], "said once"
    removed = kernel.ok("%%rank 0\ndel os.environ['WORLD_SIZE']").stdout  # transformers' tp_plan then splits nothing
    assert "the cell has set WORLD_SIZE=, which misleads" in removed
    (restoring,) = {line.partition("`")[2].partition("`")[0] for line in printed.splitlines()}
    assert kernel.ok(f"%%distributed\nimport os\n{restoring}\nos.environ['RANK'] == str(rank)").lines() == [
        "[ranks 0-3] True"
    ]
    lines = kernel.ok("%%distributed --ranks 0-1\n%env WORLD_SIZE=1").lines()
    assert any(line.startswith("[ranks 0-1] axon_nb: the cell has set WORLD_SIZE=1") for line in lines), lines
    kernel.ok(f"%%distributed\n{restoring}")


def test_sync_batch_norm_on_cpus(kernel: Kernel) -> None:
    reply = kernel.run("%%distributed\ntorch.nn.SyncBatchNorm(3)(torch.ones(2, 3))")
    assert "use `axon_nb.parallel.SyncBatchNorm`" in reply.traceback


def test_ddp_model_is_pulled_as_its_module(kernel: Kernel) -> None:
    kernel.ok(
        "%%distributed\nfrom torch.nn.parallel import DistributedDataParallel\n"
        "replica = DistributedDataParallel(torch.nn.Linear(2, 2))"
    )
    assert "pull its `.module`" in kernel.run("%pull replica").evalue
    kernel.ok("%pull replica.module --ranks 0 --as pulled")
    kernel.ok("%%distributed\ndel replica")


def test_thread_using_the_main_threads_group_gets_a_hint(kernel: Kernel) -> None:
    reply = kernel.run(
        "%%distributed\nimport threading\n"
        "def beside():\n    dist.all_reduce(torch.ones(3))\n"
        "thread = threading.Thread(target=beside, name='beside')\n"
        "if rank == 0:\n    thread.start()\n    thread.join()\n"
        "dist.all_reduce(torch.ones(5))\nif rank != 0:\n    thread.start()\n    thread.join()"
    )
    assert "Threads of the ranks (beside) communicate in the same group as the main thread" in reply.traceback


def test_async_checkpoint_in_a_separate_group(kernel: Kernel, tmp_path: Path) -> None:
    kernel.ok(
        "%%distributed\nimport torch.distributed.checkpoint as dcp\nfrom torch.distributed.fsdp import fully_shard\n"
        "model, group = fully_shard(torch.nn.Linear(4, 4)), dist.new_group()\n"
        f"state, folder = {{'model': model.state_dict()}}, {str(tmp_path)!r}\n"
        "saved = dcp.async_save(state, checkpoint_id=folder, process_group=group)\n"
        "for _ in range(20):\n    model(torch.ones(2, 4)).sum().backward()\n"
        "_ = saved.result()"
    )


def test_script_has_the_cells_that_ran_on_ranks(fresh_cluster: FreshCluster, tmp_path: Path) -> None:
    kernel = fresh_cluster(2)
    kernel.ok("t_size = 3\n%push t_size")
    kernel.ok("%%distributed --ranks 1\nfirst = t_size + 1\nprint(first)")
    kernel.ok("%distributed auto on --ranks 0")
    kernel.ok("second = 2\n%distributed config\nprint(second)")
    kernel.ok("%%local\nhere = 4")
    kernel.ok("%distributed auto off")
    assert kernel.run("%%distributed\nthird = 3\nraise ValueError('stop')\nlost = 5").ename == "CellError"
    kernel.ok("%%distributed\nprint(third)")
    kernel.ok("get_ipython().run_cell('%%distributed\\nnested = 6')\nplain = 7")
    kernel.ok("%%distributed\nundone = 8")
    kernel.ok("%distributed undo")
    script = tmp_path / "train.py"
    kernel.ok(f"%distributed export {script}")
    text = script.read_text(encoding="utf-8")
    assert "--t-size" in text
    assert "%%distributed --ranks 1\nif rank == 1:\n    first = t_size + 1\n    print(first)\n" in text
    assert "%%distributed --ranks 0\nif rank == 0:\n    second = 2\n" in text
    assert "third = 3\n# Failed here in the notebook at line 2 (" in text
    assert "# lost = 5\n" in text
    assert not [name for name in ("here", "nested", "plain", "undone") if f"{name} = " in text]
