"""The script of a history: its content, that it parses, and that ruff accepts it."""

from __future__ import annotations

import ast
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

from axon_nb.cluster import history as journal
from axon_nb.errors import UsageError
from axon_nb.export import export_history
from axon_nb.export.script import make_script
from axon_nb.export.translation import apply_ruff
from axon_nb.records.history import ExecutedCell, PushedValues, SessionFacts

FACTS = SessionFacts(4, "gloo", threads=3)


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
