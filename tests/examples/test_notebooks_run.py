"""Examples and the guide run as notebooks, and a loss that differs between ranks."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbformat import NotebookNode

from tests.support.cell_output import by_rank

pytestmark = pytest.mark.timeout(900)

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = sorted(path.stem for path in (ROOT / "examples").glob("[0-9]*.py"))
ON_RANKS = [name for name in EXAMPLES if "\n# %%distributed" in (ROOT / "examples" / f"{name}.py").read_text()]
"""The others (mock worlds, plans) have no cell on ranks, and so nothing to export."""
LOSSES = {
    "03_data_parallel": "history",
    "04_fsdp_zero": "losses",
    "05_tensor_parallel": "losses, thrifty_losses",
    "06_pipeline": "history",
    "07_three_d": "first, last",
    "15_look_inside": "changed, continued(), one_back.tolist()",
    "11_the_guide": "losses, reference_loss.item(), result, loss.item(), compressed, plain, right",
}
"""Every loss that an example has at its end, as an expression on its ranks."""
STOP = "\n# %%\n# %distributed stop\n"
ON_DIGITS = [name for name in EXAMPLES if "\nfrom sklearn" in (ROOT / "examples" / f"{name}.py").read_text()]
QUICKSTART = "01_quickstart"
TO_SCRIPT = "10_from_notebook_to_script"
GUIDE = "11_the_guide"
PROTECTED = "12_nothing_is_lost"  # a rank dies in it, and a cell is taken back: not for a script

SOURCE = Path(__file__).resolve().parents[2] / "examples" / "11_the_guide.py"

GUIDE_CELLS = {
    "PyTorch DistributedDataParallel (DDP)": ["train_ddp", "setup", "cleanup"],
    "Using torchrun": [],
    "Gradient accumulation": ["GradientAccumulationTrainer"],
    "Mixed precision training": ["MixedPrecisionTrainer"],
    "Tensor parallelism (Megatron-LM)": [],
    "A transformer": ["TensorParallelTransformer"],
    "Pipeline parallelism": [],
    "GPipe (micro-batching for pipeline)": ["train_gpipe"],
    "ZeRO (Zero Redundancy Optimizer)": [],
    "DeepSpeed": ["train_with_deepspeed"],
    "Fully Sharded Data Parallel (FSDP)": ["train_fsdp"],
    "3D parallelism (data + tensor + pipeline)": ["train_3d"],
    "Accelerate (Hugging Face)": ["train_with_accelerate"],
    "Horovod": ["train_with_horovod"],
    "Profiling and bottleneck analysis": ["profile_training"],
    "Gradient checkpointing": ["CheckpointedModel"],
    "Overlap communication and computation": ["overlap_communication_computation"],
    "Gradient compression": ["gradient_compression"],
    "Hierarchical all-reduce": ["hierarchical_all_reduce"],
}
"""The guide's examples in its order, and what their functions and classes are called there."""


def run_notebook(source: Path, out: Path) -> NotebookNode:
    """Execute one example; returns the saved notebook."""
    command = [sys.executable, "scripts/run_notebook.py", str(source), "--out", str(out)]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stdout + found.stderr
    page = (out / f"{source.stem}.html").read_text(encoding="utf-8")
    assert "<html" in page
    return nbformat.read(out / f"{source.stem}.ipynb", as_version=4)


def streams(notebook: NotebookNode) -> str:
    """All that the cells printed."""
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    return "".join(output["text"] for output in outputs if output["output_type"] == "stream")


def _tell(expression: str) -> str:
    # In one piece: the processes of a script write to the same pipe, without buffers.
    return f"import sys\n_ = sys.stdout.write(f'every loss: {{({expression})!r}}\\n')\n"


def reported(text: str) -> set[str]:
    """What the lines of `_tell` say."""
    return set(re.findall(r"every loss: (.*)", text))


@pytest.fixture(scope="module")
def execute(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], NotebookNode]:
    """Executes an example, named without its suffix; each once. At its end it prints its losses."""

    def run(name: str) -> NotebookNode:
        source, folder = ROOT / "examples" / f"{name}.py", tmp_path_factory.mktemp(name)
        if name in LOSSES:
            cells, stop, rest = source.read_text(encoding="utf-8").partition(STOP)
            assert stop, "the example is to end its ranks"
            source = folder / source.name
            source.write_text(f"{cells}\n# %%\n# %%distributed\n{_tell(LOSSES[name])}{stop}{rest}", encoding="utf-8")
        return run_notebook(source, folder)

    return cache(run)


def uncached(execute: Any) -> Callable[[str], NotebookNode]:
    """Executes it again, as the environment differs."""
    run: Callable[[str], NotebookNode] = execute.__wrapped__
    return run


@pytest.fixture(scope="module")
def quickstart(execute: Callable[[str], NotebookNode]) -> NotebookNode:
    """The quickstart, executed with Gloo: its sums have the same bits under torchrun."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AXON_NB_CPU_BACKEND", "gloo")
        return uncached(execute)(QUICKSTART)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[] if name in (QUICKSTART, TO_SCRIPT, PROTECTED) else pytest.mark.slow)
        for name in EXAMPLES
    ],
)
def test_example_runs(name: str, execute: Callable[[str], NotebookNode]) -> None:
    cells = [cell for cell in execute(name).cells if cell.cell_type == "code" and cell.source.strip()]
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    failed = [any(output.output_type == "error" for output in cell.outputs) for cell in cells]
    assert failed == ["raises-exception" in cell.metadata.get("tags", []) for cell in cells]


def test_losses_after_a_death_equal_an_undisturbed_run(execute: Callable[[str], NotebookNode]) -> None:
    shown = by_rank(streams(execute(PROTECTED)))
    expected = {"the same losses, to the last digit: True", "the losses are as before: True"}
    assert all(expected <= set(shown[rank]) for rank in range(4))


@pytest.mark.parametrize("name", ON_DIGITS)
def test_missing_scikit_learn_is_reported_with_fix(name: str, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("import sys\nsys.modules['sklearn'] = None\n")
    path = os.pathsep.join([str(tmp_path), str(ROOT), os.environ.get("PYTHONPATH", "")])
    source = ROOT / "examples" / f"{name}.py"
    command = [sys.executable, "scripts/run_notebook.py", str(source), "--out", str(tmp_path)]
    found = subprocess.run(
        command, cwd=ROOT, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, check=False
    )
    assert found.returncode == 1
    (line,) = [line for line in found.stderr.splitlines() if line.startswith("UsageError: ")]
    assert re.fullmatch(r"UsageError: This notebook needs scikit-learn.* Run `%pip install .*`, then this .*", line)
    assert "ModuleNotFoundError" not in found.stderr


def test_quickstart_learns_the_digits(quickstart: NotebookNode) -> None:
    found = re.search(r"([0-9.]+)% of 360 test digits are right", streams(quickstart))
    assert found is not None
    assert float(found[1]) > 95


def test_quickstart_shows_the_failing_rank_alone(quickstart: NotebookNode) -> None:
    (cell,) = [cell for cell in quickstart.cells if "raises-exception" in cell.metadata.get("tags", [])]
    (error,) = [output for output in cell.outputs if output["output_type"] == "error"]
    shown = re.sub(r"\x1b\[[0-9;]*m", "", "\n".join(error["traceback"]))
    assert "KeyError: 2" in shown
    assert "line 3" in shown
    assert "[rank 2]" in shown


def test_quickstart_goes_on_after_the_failure(quickstart: NotebookNode) -> None:
    assert "the weights sum to 1.0, and the model is still" in streams(quickstart)


def test_quickstart_saves_the_losses_of_its_epochs(quickstart: NotebookNode) -> None:
    (cell,) = [cell for cell in quickstart.cells if ".style" in cell.source]
    (output,) = cell.outputs
    found = [float(text) for text in re.findall(r">([0-9]\.[0-9]{3})<", output["data"]["text/html"])]
    assert len(found) == 12
    assert found[-1] < 0.1 * found[0]


def test_quickstart_needs_only_what_pip_installs_with_axon_nb() -> None:
    source = (ROOT / "examples" / f"{QUICKSTART}.py").read_text(encoding="utf-8")
    modules = {line.split()[1].partition(".")[0] for line in source.splitlines() if re.match(r"(import|from) ", line)}
    assert modules <= {"axon_nb", "numpy", "pandas", "torch"}


@pytest.mark.slow
def test_sharded_training_learns_and_memory_is_as_estimated(execute: Callable[[str], NotebookNode]) -> None:
    notebook = execute("04_fsdp_zero")
    found = re.search(r"the loss went from ([0-9.]+) to ([0-9.]+)", streams(notebook))
    assert found is not None
    assert float(found[2]) < float(found[1]) - 1
    (table,) = [out for cell in notebook.cells if "compared[0]" in cell.source for out in cell.outputs]
    rows = re.findall(r"<tr>(.*?)</tr>", table["data"]["text/html"], flags=re.DOTALL)[1:]
    cells = [[re.sub(r"<[^>]*>", "", cell).strip() for cell in re.findall(r"<td.*?</td>", row)] for row in rows]
    assert len(cells) == 5
    assert all(row[4] == row[5] for row in cells)


@pytest.mark.slow
def test_guide_notebook_confirms_its_claims(execute: Callable[[str], NotebookNode]) -> None:
    notebook = execute(GUIDE)
    reported = streams(notebook)
    assert ": False" not in reported
    assert "process 0 of 1;" not in reported, "Accelerate trains every rank by itself"
    assert reported.count(": True") >= 12
    accuracies = [float(number) for number in re.findall(r"([0-9.]+)% right", reported)]
    assert len(accuracies) >= 7
    assert min(accuracies) > 85
    (hanging,) = [cell for cell in notebook.cells if "raises-exception" in cell.metadata.get("tags", [])]
    (error,) = [output for output in hanging.outputs if output["output_type"] == "error"]
    assert "all_reduce" in "\n".join(error["traceback"])


def test_failing_cell_fails_the_run_and_is_saved(tmp_path: Path) -> None:
    source = tmp_path / "failing.py"
    source.write_text("# %%\n1 / 0\n", encoding="utf-8")
    command = [sys.executable, "scripts/run_notebook.py", str(source), "--out", str(tmp_path)]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert found.returncode == 1
    assert "ZeroDivisionError" in found.stderr
    assert (tmp_path / "failing.ipynb").exists()


def run_exported(notebook: NotebookNode, folder: Path, *, more: str = "") -> str:
    """Export an executed notebook to a folder, let ruff read the script, and run it with `more` before its last line.

    Returns:
        What it printed.
    """
    source, script = folder / "notebook.ipynb", folder / "train.py"
    nbformat.write(notebook, source)
    (folder / "data").symlink_to(ROOT / "examples" / "data")
    command = [sys.executable, "-m", "axon_nb.cli", "export", str(source), str(script), "--force"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = re.search(r"--nproc-per-node (\d+)", done.stdout)
    assert found is not None
    lint = [sys.executable, "-m", "ruff", "check", "--no-cache", str(script)]
    checked = subprocess.run(lint, cwd=folder, capture_output=True, text=True, check=False)
    assert checked.returncode == 0, checked.stdout
    text, end = script.read_text(), "\ndist.destroy_process_group()\n"
    script.write_text(text.removesuffix(end) + f"\n{more}\n{end}")
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", found[1], str(script)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "default"}
    run = subprocess.run(launch, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout + run.stderr
    return run.stdout


def test_exported_quickstart_has_the_same_losses_to_the_last_digit(quickstart: NotebookNode, tmp_path: Path) -> None:
    (pulled,) = [cell for cell in quickstart.cells if cell.source.startswith("%pull losses")]
    losses = pulled.outputs[-1]["data"]["text/plain"]
    printed = run_exported(quickstart, tmp_path, more="if rank == 0:\n    print(losses[-3:])")
    assert losses in printed
    shown = re.findall(r"(epoch +\d+: loss [0-9.]+)", streams(quickstart))
    assert len(shown) == 12
    assert re.findall(r"(epoch +\d+: loss [0-9.]+)", printed) == shown


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", [name for name in ON_RANKS if name not in (QUICKSTART, TO_SCRIPT, PROTECTED)])
def test_exported_example_prints_the_same_losses(
    name: str, execute: Callable[[str], NotebookNode], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AXON_NB_CPU_BACKEND", "gloo")
    notebook = uncached(execute)(name)
    printed = run_exported(notebook, tmp_path)
    on_ranks = [cell for cell in notebook.cells if cell.source.startswith("%%")]
    shown, said = streams(NotebookNode(cells=on_ranks)), "loss|nats per byte"
    lines = re.findall(rf"^(?:\[ranks? [0-9,-]+\] )?(.*\b(?:{said})\b.*[0-9]\.[0-9]+.*)$", shown, re.MULTILINE)
    assert not [line for line in dict.fromkeys(lines) if line not in printed and " s" not in line], printed
    if name in LOSSES:
        assert reported(printed) == reported(shown)
        assert all("." in line for line in reported(shown))
        assert reported(shown)


@pytest.mark.slow
def test_plans_are_shown_without_ranks(execute: Callable[[str], NotebookNode]) -> None:
    notebook = execute("08_will_it_fit")
    shown = {
        cell.source: "".join(
            output.get("data", {}).get("text/html", output.get("data", {}).get("text/plain", ""))
            for output in cell.outputs
        )
        for cell in notebook.cells
        if cell.cell_type == "code"
    }
    (table,) = [text for source, text in shown.items() if source.startswith("found = plan.search")]
    assert re.search(r"64 GPUs of 80 GiB, 256 samples per step: [1-9][0-9]* of [0-9]+ layouts fit", table)
    (pipeline,) = [text for source, text in shown.items() if source.startswith('plan.schedule("1F1B"')]
    assert pipeline.count("<rect") > 64
    assert "GiB" in next(text for source, text in shown.items() if source.startswith("alone ="))
    assert "leave one of the two out" in streams(notebook)
    figures = [
        output
        for cell in notebook.cells
        for output in cell.get("outputs", [])
        if "application/vnd.plotly.v1+json" in output.get("data", {})
    ]
    assert len(figures) == 3


@pytest.mark.slow
def test_dashboards_are_saved_as_pictures(execute: Callable[[str], NotebookNode]) -> None:
    notebook = execute("09_dashboards")
    pages = [
        output["data"]["text/html"]
        for cell in notebook.cells
        for output in cell.get("outputs", [])
        if "data:image/svg+xml;base64," in output.get("data", {}).get("text/html", "")
    ]
    assert (
        len(pages) == 10
    )  # the panels of watch, timeline, shards twice, memory twice; strip and timeline of two cells
    shown = "\n".join(pages)
    for words in ("loss", "communication hidden", "4 stages, 8 microbatches", "ideal", "replicated", "sharded"):
        assert words in shown, words


def sections() -> dict[str, str]:
    """The text of each section of the notebook, by its heading: up to the next heading of any level."""
    text = SOURCE.read_text(encoding="utf-8")
    parts = re.split(r"^# #+ (.+)$", text, flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def test_every_example_of_the_guide_is_present_in_order() -> None:
    found = sections()
    assert [heading for heading in found if heading in GUIDE_CELLS] == list(GUIDE_CELLS)
    for heading, names in GUIDE_CELLS.items():
        cells = found[heading].split("# %%\n")[1:]
        assert cells, f"{heading} has no cell"
        defined = set()
        for cell in cells:
            tree = ast.parse(re.sub(r"^# %.*$", "", cell, flags=re.MULTILINE))
            defined |= {node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.ClassDef)}
        assert defined >= set(names), heading


def test_every_example_states_its_corrections() -> None:
    for heading, text in sections().items():
        if heading in GUIDE_CELLS:
            assert re.search(r"^# - (Completed|Corrected): .*[^ ]", text, re.MULTILINE), heading


@pytest.mark.slow
def test_causes_of_another_loss_are_named_one_after_the_other(tmp_path: Path) -> None:
    notebook = run_notebook(ROOT / "examples" / "13_the_loss_differs.py", tmp_path)
    reports = [
        output["data"]["text/plain"]
        for cell in notebook.cells
        if "--compare" in cell.source.partition("\n")[0]
        for output in cell.outputs
        if "text/plain" in output.get("data", {})
    ]
    expected = [
        "Each rank normalises its own part of the batch.",
        "means over unequal parts of what is averaged",
        "agree with those of one rank",
        "the all-reduce in forward is missing",
        "it is summed over 2 ranks once too often",
        "agree with those of one rank",
    ]
    assert len(reports) == len(expected)
    assert [words for words, report in zip(expected, reports, strict=True) if words not in report] == []
    shown = streams(notebook)
    (alone,) = re.findall(r"one process: the loss is ([0-9.]+)", shown)
    wrong, right = re.findall(r"two ranks: the loss is ([0-9.]+)", shown)
    assert abs(float(wrong) - float(alone)) > 0.01
    assert float(right) == pytest.approx(float(alone), abs=2e-5)
