"""Messages name the innermost line of the user's code, and files of cells have the same name on all ranks."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.kernel import Kernel

MODULE = "import torch\nimport torch.distributed as dist\n\n\ndef step():\n    dist.all_reduce(torch.ones(1))\n"


@pytest.fixture
def with_functions(kernel: Kernel, tmp_path: Path) -> Iterator[Kernel]:
    """The kernel, whose ranks have `step` of a file and `inner` of another cell."""
    (tmp_path / "steps_of_tests.py").write_text(MODULE)
    kernel.ok(
        f"%%distributed\nimport sys; sys.path.insert(0, {str(tmp_path)!r})\nfrom steps_of_tests import step\n"
        "def inner():\n    dist.all_reduce(torch.ones(1))"
    )
    yield kernel
    kernel.ok("%%distributed\ndel sys.path[0], sys.modules['steps_of_tests']")


def test_line_in_a_function_of_another_cell(with_functions: Kernel) -> None:
    reply = with_functions.run("%%distributed\ndef train():\n    inner()\nif rank != 1:\n    train()")
    assert "wait in all_reduce at line 5 (inner, Cell In[" in reply.evalue
    assert "] line 5) for rank 1" in reply.evalue


def test_line_in_a_function_of_a_file(with_functions: Kernel) -> None:
    reply = with_functions.run("%%distributed\nif rank == 3:\n    raise ValueError('x')\nstep()")
    assert "waited in all_reduce at line 4 (step, steps_of_tests.py line 6)" in reply.traceback


def test_line_in_a_function_of_the_same_cell(kernel: Kernel) -> None:
    reply = kernel.run("%%distributed\ndef local():\n    dist.barrier()\nif rank != 2:\n    local()")
    assert "wait in barrier at line 5 (local, line 3) for rank 2" in reply.evalue


def test_mismatched_calls_name_their_lines(with_functions: Kernel) -> None:
    reply = with_functions.run("%%distributed\nif rank == 0:\n    step()\nelse:\n    dist.broadcast(torch.ones(1), 0)")
    assert "in all_reduce at line 3 (step, steps_of_tests.py line 6)" in reply.traceback
    assert "in broadcast at line 5" in reply.traceback


def test_call_in_a_thread_names_a_line_of_the_cell(kernel: Kernel) -> None:
    reply = kernel.run(
        "%%distributed\nimport threading\ndef other():\n    dist.all_reduce(torch.ones(1))\n"
        "if rank == 0:\n    thread = threading.Thread(target=other)\n    thread.start()\n    thread.join()\n"
        "else:\n    dist.barrier()"
    )
    assert "rank 0 is in all_reduce at line 4" in reply.traceback + reply.stderr


def test_warnings_and_tracebacks_are_merged_across_ranks(kernel: Kernel) -> None:
    reply = kernel.ok(
        "%%distributed\nimport traceback, warnings\nwarnings.warn('take care')\n"
        "try:\n    1/0\nexcept ZeroDivisionError:\n    traceback.print_exc()"
    )
    warning = next(line for line in reply.stderr.splitlines() if "take care" in line)
    assert "<ipython-input-" in warning
    assert ":3: UserWarning: take care" in warning
    assert 'File "<ipython-input-' in reply.stderr
    assert "ipykernel_" not in reply.stderr


def test_source_of_a_function_from_an_earlier_cell_of_the_same_number(kernel: Kernel) -> None:
    kernel.ok("import axon_nb\nfrom axon_nb.cluster.session import current")
    kernel.ok("current.get().run('def first():\\n    return 1', cell=7)")
    kernel.ok("current.get().run('def second():\\n    return 2', cell=7)")
    reply = kernel.ok("%%rank 0\nimport inspect\nprint(inspect.getsource(first), inspect.getsource(second))")
    assert "return 1" in reply.stdout
    assert "return 2" in reply.stdout


def test_libraries_know_the_files_of_cells(kernel: Kernel, tmp_path: Path) -> None:
    executing = "from executing.executing import is_ipython_cell_filename"  # IPython needs it
    reply = kernel.ok(f"%%distributed\n{executing}\nis_ipython_cell_filename((lambda: 0).__code__.co_filename)")
    assert reply.lines() == ["[ranks 0-3] True"]
    pytest.importorskip("joblib")
    memory = f"import joblib\nmemory = joblib.Memory(f'{tmp_path}/{{rank}}', verbose=0)"
    cached = (
        f"%%distributed\n{memory}\n@memory.cache\ndef square(x):\n    print('computed')\n    return x * x\nsquare(3)"
    )
    assert kernel.ok(cached).lines() == ["[ranks 0-3] computed", "[ranks 0-3] 9"]
    assert kernel.ok(cached).lines() == ["[ranks 0-3] 9"]  # in a cell with another number
