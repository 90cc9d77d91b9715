"""The script of a history or of a notebook file, and groups that cells of it create themselves."""

from __future__ import annotations

import ast
import json
import pickle
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

from axon_nb import cli
from axon_nb.cluster import history as journal
from axon_nb.errors import UsageError
from axon_nb.export import export_history, export_notebook
from axon_nb.export.script import make_script
from axon_nb.export.translation import apply_ruff, guard_group_calls
from axon_nb.records.history import ExecutedCell, PushedValues, SessionFacts

FACTS = SessionFacts(4, "gloo", threads=3)

GUARD = "if not dist.is_initialized():  # this script created the group above\n"
ON_CPUS = SessionFacts(4, "gloo", threads=3)
ON_GPUS = SessionFacts(2, "nccl", 1, on_gpus=True)

EXAMPLES = Path(__file__).resolve().parents[3] / "examples"
ON_RANKS = sorted(path for path in EXAMPLES.glob("*.ipynb") if '"%%distributed' in path.read_text(encoding="utf-8"))


def cell(code: str, magic: str = "distributed", **more: Any) -> ExecutedCell:
    return ExecutedCell(more.pop("number", 1), magic, code, **more)


def script(*history: ExecutedCell | PushedValues, **options: Any) -> str:
    """The text for these entries; it parses, and passes ruff."""
    facts = options.pop("facts", FACTS)
    target = Path(tempfile.gettempdir(), "train.py")
    text, undefined = apply_ruff(
        make_script(history, facts, title="a test", file_name="train.py", **options).text, target
    )
    ast.parse(text)
    assert undefined == options.pop("undefined", [])
    command = [sys.executable, "-m", "ruff", "check", "--no-cache", "--stdin-filename", str(target), "-"]
    run = subprocess.run(command, input=text, cwd=target.parent, capture_output=True, text=True, check=False)
    assert run.returncode == 0, f"{run.stdout}\n{text}"
    return text


def test_set_up_and_teardown() -> None:
    text = script(cell("x = torch.ones(2, device=device) * rank\ndist.all_reduce(x)\nprint(x)\n"))
    assert text.startswith('"""Exported from a test. Run it with\n\n    torchrun --nproc-per-node 4 train.py\n"""\n')
    for line in (
        'rank = int(os.environ["RANK"])',
        "torch.set_num_threads(3)  # as on the notebook's ranks; torchrun sets 1",
        'device = torch.device("cpu")',
        'dist.init_process_group("gloo")',
        "# In [1]: %%distributed",
    ):
        assert f"{line}\n" in text
    assert "local_rank" not in text
    assert text.endswith("\ndist.destroy_process_group()\n")


def test_script_assigns_one_gpu_per_rank() -> None:
    text = script(cell("x = torch.ones(1, device=device)\n"), facts=SessionFacts(2, "nccl", 1, on_gpus=True))
    assert 'device = torch.device("cuda", local_rank % torch.cuda.device_count())' in text
    assert 'dist.init_process_group("nccl", device_id=device)' in text
    assert "sleep" not in text


def test_script_on_gloo_joins_its_threads() -> None:
    text = script(cell("x = torch.ones(1)\n"))
    wait = text.index("    time.sleep(0.5)")
    assert text.index('if dist.get_backend() == "gloo":') < wait < text.index("dist.destroy")


def test_ranks_start_with_the_seed_of_the_notebooks_ranks() -> None:
    assert "\ntorch.manual_seed(7)  #" in script(cell("x = 1\n"), facts=SessionFacts(2, seed=7))
    assert "manual_seed" not in script(cell("x = 1\n"))


def test_without_known_threads_cores_are_shared_as_in_the_notebook() -> None:
    text = script(cell("x = 1\n"), facts=SessionFacts(2))
    assert 'len(os.sched_getaffinity(0)) // int(os.environ["LOCAL_WORLD_SIZE"])' in text


def test_cells_of_some_ranks_are_inside_an_if() -> None:
    text = script(
        cell('import json\nif rank:\n    text = """a\nb"""\n', "distributed --ranks 0,2-3"),
        cell("print(json.dumps(text))\n", "rank 2", number=2),
        cell("dist.all_reduce(torch.ones(1), group=subgroup)\n", "distributed --ranks 1,3", number=3),
        cell("x = 1\n", "distributed --ranks 0-3", number=4),
    )
    assert 'if rank in (0, 2, 3):\n    if rank:\n        text = """a\nb"""\n' in text
    assert "if rank == 2:\n    print(json.dumps(text))\n" in text
    assert "subgroup = dist.new_group([1, 3])  # every rank must call this\nif rank in (1, 3):\n" in text
    assert "\nx = 1\n" in text
    assert text.index("import json") < text.index("rank = int")


def test_imports_are_hoisted_once() -> None:
    text = script(
        cell("from torch import nn\nimport math, os\nmodel = nn.Linear(1, 1)\n"),
        cell("from torch import nn\nimport json\nprint(nn, math.pi)\n", number=2),
        cell("os.environ['X'] = '1'\nimport random\nprint(random.random())\n", number=3),
    )
    assert text.count("from torch import nn\n") == 1
    assert "import json" not in text
    assert "\nos.environ['X'] = '1'\nimport random\n" in text


def test_last_values_of_cells_are_printed() -> None:
    text = script(cell("x = 1\nx + 1\n"), cell("x.append(2)\n", number=2), cell("len([x])\n", number=3))
    assert "show(x + 1)\n" in text
    assert "\nx.append(2)\n" in text
    assert "show(len([x]))" in text
    assert text.count("def show(value):") == 1


def test_pushed_values_are_options_files_or_code() -> None:
    history = [
        cell("import numpy as np\nrows = np.arange(6) * 2\nrows[0] = 9\nunused = 1\n", ""),
        PushedValues(("lr", "flag", "sizes"), literals={"lr": "0.1", "flag": "True", "sizes": "(1, 2)"}),
        PushedValues(("rows",)),
        PushedValues(("images", "lost", "never")),
        PushedValues(("lr",), literals={"lr": "0.01"}),
        cell("print(lr, flag, sizes, rows, images, lost)\n", number=3),
    ]
    made = make_script(history, FACTS, title="t", file_name="my-train.py", values=["images"])
    assert made.file_names == ("images",)
    assert made.paths == ("lost",)
    text = script(*history, values=["images"])
    assert 'parser.add_argument("--lr", type=float, default=0.1)' in text
    assert "action=argparse.BooleanOptionalAction, default=True" in text
    assert "type=ast.literal_eval, default=(1, 2)" in text
    assert "rows = np.arange(6) * 2\nrows[0] = 9\n" in text
    assert 'images = data["images"]\n' in text
    assert 'metavar="FILE"' in text
    assert "\nlr = 0.01\n" in text
    assert "unused" not in text
    assert "never" not in text


def test_scattered_values_are_split_over_ranks() -> None:
    text = script(
        PushedValues(("x",), scatter_dim=0, literals={"x": "[1, 2, 3]"}),
        PushedValues(("y",), ranks=(1, 3), scatter_dim=1),
        cell("print(x, y)\n"),
        values=["y"],
    )
    assert "x = [1, 2, 3]\nx = share(x, rank, world_size)\n" in text
    assert "if rank in (1, 3,):\n    y = share(y, [1, 3].index(rank), 2, dim=1)\n" in text


def test_value_pushed_again_before_use_is_set_once() -> None:
    history = [PushedValues(("rows",)), PushedValues(("rows",), scatter_dim=0), cell("print(rows)\nrows\n")]
    made = make_script(history, FACTS, title="t", file_name="t.py", values=["rows"])
    assert (made.file_names, made.paths) == (("rows",), ())
    assert "\n\n\n\n" not in made.text
    used_before = [history[0], cell("print(rows)\n"), *history[1:]]
    assert make_script(used_before, FACTS, title="t", file_name="t.py", values=["rows"]).paths == ("rows",)
    on_one = [history[0], PushedValues(("rows",), ranks=(1,)), history[2]]
    assert make_script(on_one, FACTS, title="t", file_name="t.py", values=["rows"]).paths == ("rows",)


def test_script_does_not_reuse_names_of_the_cells() -> None:
    text = script(
        PushedValues(("x", "__y"), scatter_dim=0, literals={"x": "[1, 2, 3]"}),
        PushedValues(("lr",), literals={"lr": "1"}),
        cell("share = show = parser = arguments = data = 1\nprint(x, __y, lr)\nshare\n"),
        values=["__y"],
    )
    for name in ("def share_(", "def show_(", "parser_ = ", "arguments_ = ", "data_ = ", "show_(share)"):
        assert name in text


def test_failed_cells_run_up_to_the_failing_statement() -> None:
    failed = cell("a = {}\nb = a[rank]\nc = 1\n", outcome="failed", failed_line=2, error="rank 0: KeyError: 0")
    text = script(failed, cell("a[0] = 1\nprint(a)\n", number=2))
    assert "\na = {}\n# Failed here in the notebook at line 2 (rank 0: KeyError: 0); the rest is omitted:\n" in text
    assert "# b = a[rank]\n# c = 1\n" in text
    alone = script(failed, cell("print(1)\n", number=2))
    assert "# a = {}\n# b = a[rank]\n" in alone
    unknown = cell("a = {}\n", outcome="failed", error="boom")
    assert "\n# a = {}\n" in script(unknown, cell("print(1)\n", number=2))


def test_interrupted_cells_are_complete_and_marked() -> None:
    text = script(cell("for i in range(9):\n    print(i)\n", outcome="interrupted"))
    assert "# In [1]: %%distributed (interrupted in the notebook)\nfor i in range(9):\n" in text


def test_awaiting_cells_run_in_a_coroutine() -> None:
    text = script(cell("import asyncio\nawait asyncio.sleep(0)\nx = 1\n", number=7), cell("print(x)\n", number=8))
    assert "async def cell_7():\n    global x\n" in text
    assert "\nasyncio.run(cell_7())\n" in text


def test_magics_of_plain_cells_that_concern_ranks() -> None:
    text = script(cell("%distributed seed 5 --per-rank\n", ""), cell("print(torch.rand(1))\n"))
    assert "random.seed(5 + rank)\nnp.random.seed((5 + rank) % 2**32)\ntorch.manual_seed(5 + rank)\n" in text


def test_quiet_and_repeated_cells_keep_their_options() -> None:
    text = script(
        cell("x = [1]\nx\n", "distributed --quiet --out kept"),
        cell("import math\nx.append(math.pi)\nx\n", "rank 1 --repeat 3", number=2),
        cell("print(x)\n", "distributed --repeat 1 --profile", number=3),
    )
    assert "show(" not in text
    assert "if rank == 1:\n    for repetition in range(3):\n        x.append(math.pi)\n        x\n" in text
    assert "\nprint(x)\n" in text


def test_cells_that_did_not_run_on_ranks_are_omitted() -> None:
    text = script(
        cell("print(1)\n"),
        cell("print(2)\n", "distributed --repeat many", outcome="failed", number=2),
        cell("print(3)\n", "distributed --ranks 9", outcome="failed", number=3),
        cell("print(4)\n", "distributed --help", number=4),
        cell("print(5\n", outcome="failed", number=5),
        cell("%distributed auto off\n\n%pull x\n", number=6),
    )
    assert text.count("print(") == 1
    assert "auto off" not in text


def test_dead_cells_are_omitted_on_request() -> None:
    history = [
        cell("import math\nx = math.pi\n"),
        cell("y = math.e\nprint(y)\n", number=2),
    ]
    assert "x = math.pi" in script(*history)
    made = make_script(history, FACTS, title="t", file_name="t.py", live_only=True)
    assert made.omitted == 1
    assert "x = math.pi" not in made.text
    assert "import math" in made.text


def test_redefined_functions_and_ugly_style_pass_ruff() -> None:
    script(
        cell("def f(): return 1\n"),
        cell("def f(x):\n    l = 1; unused = 2\n    return l if x == None else f''\n", number=2),
        cell("from axon_nb.prelude import *\ng = lambda: rank\nworld, mesh, axon_nb\n", number=3),
    )


def test_empty_export_raises() -> None:
    with pytest.raises(UsageError, match=r"no %%distributed cell has run"):
        script(cell("x = 1\n", ""))


def test_values_are_written_beside_the_script(tmp_path: Path) -> None:
    history = [PushedValues(("x",)), cell("print(x)\n")]
    report = export_history(history, FACTS, {"x": [1.5] * 99}, tmp_path / "t.py")
    assert report.data == tmp_path / "t_data.pkl"
    with pytest.raises(UsageError, match=r"Cannot write .* to a file"):
        export_history(history, FACTS, {"x": lambda: 1}, tmp_path / "u.py")
    assert not (tmp_path / "u.py").exists()


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (1, "1"),
        (0.1, "0.1"),
        ("a", "'a'"),
        ((1, [2]), "(1, [2])"),
        (None, "None"),
        (float("inf"), ""),
        ([0] * 999, ""),
        ({1}, ""),
    ],
)
def test_short_plain_values_have_a_source_text(value: Any, text: str) -> None:
    assert journal.literal(value) == text


def plain_script(*cells: ExecutedCell, facts: SessionFacts = ON_CPUS) -> str:
    return make_script(cells, facts, title="a test", file_name="train.py").text


@pytest.mark.parametrize(
    ("cell", "kept"),
    [
        ("dist.init_process_group()\n", f"{GUARD}    dist.init_process_group()\n"),
        (
            "def setup():\n    dist.init_process_group(\n        backend='gloo',\n    )\n",
            f"def setup():\n    {GUARD}        dist.init_process_group(\n            backend='gloo',\n        )\n",
        ),
        ("init_process_group('gloo')  # again\n", f"{GUARD}    init_process_group('gloo')  # again\n"),
        (
            "torch.distributed.init_process_group()\n",
            f"{GUARD.replace('dist.is', 'torch.distributed.is')}    torch.distributed.init_process_group()\n",
        ),
        (
            "if dist.is_initialized():\n    dist.destroy_process_group()\n",
            (
                "if dist.is_initialized():\n"
                "    pass  # dist.destroy_process_group(): this script destroys the group below\n"
            ),
        ),
        (
            "dist.destroy_process_group(group=dist.group.WORLD)\nprint(1)\n",
            (
                "pass  # dist.destroy_process_group(group=dist.group.WORLD): this script destroys the group below\n"
                "print(1)\n"
            ),
        ),
        ("dist.destroy_process_group(pair)\n", "dist.destroy_process_group(pair)\n"),
        ("self.init_process_group()\n", "self.init_process_group()\n"),
    ],
)
def test_script_group_is_kept(cell: str, kept: str) -> None:
    assert guard_group_calls(cell) == kept


def test_failed_cell_is_truncated_at_the_failure() -> None:
    code = "dist.init_process_group()\na = {}\nb = a[rank]\n"
    failed = ExecutedCell(1, "distributed", code, "failed", 3, "KeyError")
    text = plain_script(failed, ExecutedCell(2, "distributed", "print(a)\n"))
    assert "    dist.init_process_group()\na = {}\n# Failed here in the notebook at line 3" in text


def test_cell_may_shadow_torch_distributed() -> None:
    text = plain_script(ExecutedCell(1, "distributed", "dist = torch.ones(2)\nprint(dist)\n"))
    assert text.endswith("\ntorch.distributed.destroy_process_group()\n")


def test_accelerate_trains_together_on_cpus() -> None:
    setting = 'os.environ.setdefault("ACCELERATE_USE_CPU", "true")  #'
    training = ExecutedCell(
        1, "distributed", "def train():\n    from transformers.trainer import Trainer\n    Trainer()\n"
    )
    assert setting in plain_script(training)
    assert setting in plain_script(ExecutedCell(1, "distributed", "import accelerate.utils as utils\nprint(utils)\n"))
    assert setting not in plain_script(ExecutedCell(1, "distributed", "import os\nprint(os.name)\n"))
    assert setting not in plain_script(training, facts=ON_GPUS)


def test_deepspeed_skips_op_builds_as_on_ranks() -> None:
    training = ExecutedCell(1, "distributed", "import deepspeed\nprint(deepspeed)\n")
    head = plain_script(training).partition("dist.init_process_group")[0]
    assert '    import_module("deepspeed.comm.torch").build_shm_op = lambda: None\n' in head
    assert "build_shm_op" not in plain_script(training, facts=ON_GPUS)


def notebook(path: Path, *cells: tuple[int | None, str], error: list[str] | None = None) -> Path:
    """Write a notebook of (prompt, source); the last cell has the error."""
    made = [
        {
            "cell_type": "code",
            "execution_count": number,
            "source": source.splitlines(keepends=True),
            "outputs": [],
            "metadata": {},
        }
        for number, source in cells
    ]
    if error:
        made[-1]["outputs"] = [
            {"output_type": "error", "ename": "CellError", "evalue": "rank 1: boom", "traceback": error}
        ]
    path.write_text(json.dumps({"cells": [{"cell_type": "markdown", "source": "# x"}, *made], "nbformat": 4}))
    return path


def test_notebook_cells_are_read_in_prompt_order(tmp_path: Path) -> None:
    source = notebook(
        tmp_path / "n.ipynb",
        (4, "%%distributed --ranks 1\nprint(step, 'second')"),
        (1, "%distributed start -n 3 --name x\n%distributed config threads=2"),
        (2, "step = 5\n%push step"),
        (3, "%%distributed\nprint('first')"),
        (None, "%%distributed\nprint('never')"),
        (5, "%%distributed\nkept = 1\nbroken = nowhere"),
        error=["[rank 1]", "Cell \x1b[32mIn[5], line 3\x1b[0m"],
    )
    report = export_notebook(source, tmp_path / "t.py")
    text = (tmp_path / "t.py").read_text()
    assert text.index("'first'") < text.index("'second'")
    assert "never" not in text
    assert "torch.set_num_threads(2)" in text
    assert "default=5" in text
    assert "# broken = nowhere" in text
    assert "torchrun --nproc-per-node 3 " in str(report)
    with pytest.raises(UsageError, match="use `--force` to overwrite it"):
        export_notebook(source, tmp_path / "t.py")


@pytest.mark.parametrize("source", ON_RANKS, ids=lambda path: path.stem)
def test_examples_that_have_not_run_are_exported_from_top_to_bottom(source: Path, tmp_path: Path) -> None:
    report = export_notebook(source, tmp_path / "train.py", live_only=source.stem.startswith("0"))
    assert report.undefined == ()
    assert report.paths == ()
    command = [sys.executable, "-m", "ruff", "check", "--no-cache", "train.py"]
    run = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout


def test_script_has_the_branch_that_was_kept_and_no_cell_that_was_tried(tmp_path: Path) -> None:
    source = notebook(
        tmp_path / "n.ipynb",
        (1, "%distributed start -n 2"),
        (2, "%%distributed --try\nx = 1"),
        (3, "%%distributed --branch lr=1e-2,3e-3\nprint('none', lr)"),
        (4, "%%distributed --branch lr=1e-2,3e-3 --keep 3e-3\nprint('kept', lr)"),
        (5, "%%distributed --branch b=1,2 --keep best:loss\nprint('best', b)"),
    )
    report = export_notebook(source, tmp_path / "t.py")
    text = (tmp_path / "t.py").read_text()
    assert report.undefined == ()
    assert "lr = 0.003  # one of 0.01, 0.003\n" in text
    assert "b = 1  # one of 1, 2\n" in text
    assert "x = 1" not in text
    assert "none" not in text


def test_cells_that_were_taken_back_are_omitted(tmp_path: Path) -> None:
    source = notebook(
        tmp_path / "n.ipynb",
        (1, "%distributed start -n 2"),
        (2, "%%distributed\nfirst = 1"),
        (3, "%%distributed\nwrong = 2"),
        (4, "gone = 3\n%push gone"),
        (5, "%%distributed --ranks 1\nworse = gone"),
        (6, "%distributed undo 2"),
        (7, "kept = 4\n%push kept"),
        (8, "%%distributed\nprint(first, kept)"),
    )
    made = json.loads(source.read_text())
    texts = {6: "Undid In [5], In [3]: ranks 0-1 have the state from before.\n"}
    for one in made["cells"][1:]:
        if text := texts.get(one["execution_count"]):
            one["outputs"] = [{"output_type": "stream", "name": "stdout", "text": [text]}]
    source.write_text(json.dumps(made))
    export_notebook(source, tmp_path / "t.py")
    text = (tmp_path / "t.py").read_text()
    assert "first = 1" in text
    assert "print(first, kept)" in text
    assert "--kept" in text
    assert not [name for name in ("wrong", "gone", "worse") if name in text]


def test_commands_that_changed_values_are_named(tmp_path: Path) -> None:
    source = notebook(
        tmp_path / "n.ipynb",
        (1, "%distributed start -n 2"),
        (2, "%%distributed\nx = 1"),
        (3, "%distributed load before"),
        (4, "%distributed sync ?\n%distributed load --help\n%distributed status"),
        (5, "%%distributed\nprint(x)"),
    )
    report = export_notebook(source, tmp_path / "t.py")
    text = (tmp_path / "t.py").read_text()
    assert text.index("x = 1") < text.index("# %distributed load before: gave the ranks") < text.index("print(x)")
    assert report.commands == ("%distributed load before",)
    assert "Not in the script, so values may differ from here on: %distributed load before." in str(report)


def test_cells_of_auto_mode_are_cells_on_ranks(tmp_path: Path) -> None:
    source = notebook(
        tmp_path / "n.ipynb",
        (1, "%distributed start -n 2"),
        (2, "%distributed auto on --ranks 1"),
        (3, "step = 1\n%push size\nprint(step, size)"),
        (4, "%%local\nplot = 1"),
        (5, "%distributed auto off"),
        (6, "here = 2"),
    )
    export_notebook(source, tmp_path / "t.py")
    text = (tmp_path / "t.py").read_text()
    assert "if rank == 1:\n    step = 1\n" in text
    assert "# %push size: the value comes from the notebook, above" in text
    assert "--size" in text
    assert "plot" not in text
    assert "here = 2" not in text


def test_export_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = notebook(tmp_path / "n.ipynb", (None, "%%distributed\nprint(1)"))
    assert cli.main(["export", str(source), str(tmp_path / "t.py"), "--live-only"]) == 0
    assert "Wrote" in capsys.readouterr().out
    assert cli.main(["export", str(source), str(tmp_path / "t.py")]) == 1
    assert "already exists" in capsys.readouterr().err
    assert cli.main(["export", str(tmp_path / "none.ipynb"), "x.py"]) == 1
    assert cli.main(["export", __file__, "x.py"]) == 1
    assert cli.main(["export", str(source), str(tmp_path / "t.txt")]) == 1
    assert "the script's name must end in .py" in capsys.readouterr().err


def test_outputs_reveal_facts_about_the_ranks(tmp_path: Path) -> None:
    facts = SessionFacts(3, "gloo", threads=5, seed=2**53 + 1)
    source = notebook(
        tmp_path / "n.ipynb",
        (1, "%distributed start -n 9"),
        (2, "%%distributed\nprint('before')"),
        (3, "%distributed restart"),
        (4, "%%distributed\nprint('after')"),
    )
    made = json.loads(source.read_text())
    card = {"output_type": "display_data", "data": {}, "metadata": {"axon_nb": facts.to_json()}}
    made["cells"][3]["outputs"] = [{"output_type": "stream", "text": ["x"]}, card]
    source.write_text(json.dumps(made))
    export_notebook(source, tmp_path / "t.py")
    text = (tmp_path / "t.py").read_text()
    for line in ("torchrun --nproc-per-node 3 t.py", "torch.set_num_threads(5)", f"torch.manual_seed({2**53 + 1})"):
        assert line in text
    assert "before" not in text
    made["cells"] = [made["cells"][2]]
    made["cells"][0]["outputs"] = [{"output_type": "stream", "text": ["Started 7 ranks (gloo); `%dis"]}]
    source.write_text(json.dumps(made))
    assert "--nproc-per-node 7 " in str(export_notebook(source, tmp_path / "u.py"))


def test_pushed_function_of_the_notebook_is_written_as_code(tmp_path: Path) -> None:
    source = "def double(x):\n    return 2 * x\n"
    names: dict[str, Any] = {"__name__": "__main__"}
    exec(source, names)
    history: list[ExecutedCell | PushedValues] = [
        ExecutedCell(1, "", source, "ok"),
        PushedValues(("double", "rows")),
        ExecutedCell(2, "distributed", "print(double(rows))\n", "ok"),
    ]
    values = {"double": names["double"], "rows": [1, 2]}
    report = export_history(history, SessionFacts(2), values, tmp_path / "train.py")
    text = (tmp_path / "train.py").read_text()
    assert "def double(x):" in text
    assert report.data is not None
    assert pickle.loads(report.data.read_bytes()) == {"rows": [1, 2]}
