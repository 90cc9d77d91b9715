"""What programs print: lines, bars, and output between cells."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.kernel import Kernel
from tests.support.processes import until

MODULE = "import torch\nimport torch.distributed as dist\n\n\ndef step():\n    dist.all_reduce(torch.ones(1))\n"

WIDGET = "application/vnd.jupyter.widget-view+json"
BARS = {
    "tqdm.auto": ("from tqdm.auto import tqdm\nfor i in tqdm(range(30), desc='steps'): time.sleep(0.02)", "30/30"),
    "tqdm.notebook": (
        "from tqdm.notebook import tqdm\nfor i in tqdm(range(30), desc='steps', display=True): time.sleep(0.02)",
        "30/30",
    ),
    "trange": ("from tqdm.notebook import trange\nfor i in trange(30, desc='steps'): time.sleep(0.02)", "30/30"),
    "rich": ("from rich.progress import track\nfor i in track(range(30), 'steps'): time.sleep(0.02)", "100%"),
}

HEAD = "Since the last cell:"


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


@pytest.mark.parametrize("bar", BARS)
def test_progress_bar_moves_and_ends(kernel: Kernel, bar: str) -> None:
    if bar == "rich":
        pytest.importorskip("rich")
    code, end = BARS[bar]
    reply = kernel.ok(f"%%rank 1\nimport time\n{code}")
    texts = [data.get("text/plain", "") for data in reply.displays]
    assert not [data for data in reply.displays if WIDGET in data]
    shown = "\n".join(texts) + reply.stdout + reply.stderr
    assert "steps" in shown
    assert end in shown


def test_other_widgets_are_shown_as_text(kernel: Kernel) -> None:
    reply = kernel.ok("%%rank 2\nimport ipywidgets\nipywidgets.IntSlider(value=3)")
    assert reply.lines() == ["[rank 2] IntSlider(value=3) (a widget of a rank: its text)"]
    assert not [data for data in reply.displays if WIDGET in data]


def test_clear_output_affects_one_rank_only(kernel: Kernel) -> None:
    reply = kernel.ok(
        "%%distributed\nfrom IPython.display import clear_output\nprint('text of', rank)\ndist.barrier()\n"
        "import time; time.sleep(0.3)\n"
        "if rank == 0:\n    for step in range(3):\n        clear_output(wait=True)\n"
        "        print('step', step)\n        time.sleep(0.1)"
    )
    assert sorted(reply.after_clear().splitlines()) == [
        "[rank 0] step 2",
        *(f"[rank {rank}] text of {rank}" for rank in (1, 2, 3)),
    ]


def shown_between(kernel: Kernel, cell: str, num_lines: int) -> list[str]:
    """Run a cell until it has shown so many lines as earlier; return them, sorted."""
    found: list[str] = []

    def all_found() -> bool:
        _, _, rest = kernel.ok(cell).stdout.partition(f"{HEAD}\n")
        found.extend(line for line in rest.splitlines() if line.startswith("  "))
        return len(found) >= num_lines

    assert until(all_found), found
    return sorted(found)


def test_child_process_that_outlives_its_cell(kernel: Kernel, tmp_path: Path) -> None:
    go, done = tmp_path / "go", tmp_path / "done"
    kernel.ok(
        "%%rank 1\nimport subprocess\n_ = subprocess.Popen(['sh', '-c', "
        f"'while [ ! -e {go} ]; do sleep .05; done; for i in 0 1 2; do echo tick $i; done; touch {done}'])"
    )
    go.touch()
    until(done.exists)
    time.sleep(0.5)  # the rank reads what children print every 0.2 s
    ticks = [f"  [rank 1] tick {i}" for i in range(3)]
    assert shown_between(kernel, "%%rank 1\nprint('own')", len(ticks)) == ticks
    assert kernel.ok("%%rank 1\nprint('own')").lines() == ["[rank 1] own"]


def test_threads_and_timers(kernel: Kernel, tmp_path: Path) -> None:
    kernel.ok(
        "%%distributed\nimport pathlib, threading\n"
        "def speak(text, number):\n"
        "    print(text, rank, flush=True)\n"
        f"    pathlib.Path({str(tmp_path)!r}, text + str(rank)).touch()\n"
        "threading.Timer(0.5, speak, ['timer', 1]).start()"
    )
    until(lambda: len(list(tmp_path.iterdir())) == 4)
    assert kernel.ok("%%distributed --quiet\nprint('nothing is shown by a quiet cell')").stdout == ""
    assert shown_between(kernel, "%%rank 0\n5", 4) == [f"  [rank {rank}] timer {rank}" for rank in range(4)]


def test_thread_of_an_earlier_cell_prints_into_the_running_cell(kernel: Kernel) -> None:
    kernel.ok(
        "%%rank 2\nimport threading\nspeak = threading.Event()\n"
        "thread = threading.Thread(target=lambda: (speak.wait(60), print('from the thread')))\nthread.start()"
    )
    assert kernel.ok("%%rank 2\nspeak.set(); thread.join()").lines() == ["[rank 2] from the thread"]


def test_much_output_is_bounded(kernel: Kernel, tmp_path: Path) -> None:
    done = tmp_path / "done"
    kernel.ok(
        "%%rank 3\nimport subprocess\n"
        f"_ = subprocess.Popen(['sh', '-c', 'sleep .3; yes | head -c 20000000; touch {done}'])"
    )
    until(done.exists)
    until(lambda: "omitted" in kernel.ok("%%rank 3\nprint('own')").stdout)
