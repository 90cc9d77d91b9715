"""However a script ends, its cluster ends; scripts of others, their import and its export train alike."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from axon_nb.export import export_notebook
from axon_nb.script import import_script
from tests.support.cell_output import by_rank
from tests.support.kernel import Kernel
from tests.support.processes import until
from tests.support.script import Finished, Script, command_lines, family, run_script

START = "import axon_nb\nc = axon_nb.start(2, devices='cpu')\nprint('alive:', c.run('rank', quiet=True)[1])\n"

ENDINGS = {
    "the context manager": (
        (
            "import axon_nb\nwith axon_nb.start(2, devices='cpu') as c:\n    print('alive:', c.run('rank')[1])\n"
            "assert not c.running\nprint('after')"
        ),
        0,
        "",
    ),
    "falling off the end": (START, 0, ""),
    "an exception": (START + "raise LookupError('half-way')", 1, "LookupError: half-way"),
    "an exception inside the with block": (
        (
            "import axon_nb\nwith axon_nb.start(2, devices='cpu') as c:\n    print('alive:', c.run('rank')[1])\n"
            "    raise LookupError('half-way')"
        ),
        1,
        "LookupError: half-way",
    ),
    "a failing cell": (START + "c.run('1 / (rank - 1)')", 1, "axon_nb.errors.CellError: rank 1: ZeroDivisionError"),
}


@pytest.mark.parametrize("ending", ENDINGS)
def test_ranks_exit_with_their_script(ending: str) -> None:
    code, exit_code, message = ENDINGS[ending]
    done = run_script(code)
    assert "alive: 1" in done.out, done.err
    assert done.code == exit_code, done.err
    assert message in done.err
    if not message:
        assert done.err == ""
    assert until(lambda: not done.left()), done.left()


def test_background_cell_does_not_keep_a_script_alive() -> None:
    done = run_script(START + "h = c.run_noblock('import time\\ntime.sleep(600)', quiet=True)")
    assert (done.code, done.err) == (0, "")
    assert until(lambda: not done.left()), done.left()


def test_script_without_start_starts_no_processes() -> None:
    done = run_script("import axon_nb\naxon_nb.start\nprint(axon_nb.Cluster.__name__)")
    assert (done.code, done.out, done.err) == (0, "Cluster\n", "")
    assert done.left() == []


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_killed_script_loses_its_ranks_after_keep_alive(tmp_path: Path, number: signal.Signals) -> None:
    script = Script(tmp_path)
    script.ok(
        "import axon_nb\nfrom axon_nb.cluster import current\ncurrent.session().settings.set('keep_alive=1')\n"
        "c = axon_nb.start(2, devices='cpu')"
    )
    assert len(script.others()) >= 4
    ranks, killed_at = script.value("[place.pid for place in c.rank_info]"), time.monotonic()
    script.process.send_signal(number)
    assert script.end() == -number
    assert until(lambda: not any(map(psutil.pid_exists, ranks)), timeout=90)
    assert time.monotonic() - killed_at >= 1, "the ranks are to wait for who may come back"
    assert until(lambda: not family(script.mark))


def test_script_killed_during_start_leaves_no_processes(tmp_path: Path) -> None:
    script = Script(tmp_path)
    # The start may be quicker than the kill: then it is the keep-alive after which nothing is left.
    script.ok("import axon_nb\nfrom axon_nb.cluster import current\ncurrent.session().settings.set('keep_alive=1')")
    script.submit("c = axon_nb.start(2, devices='cpu')")
    assert until(lambda: any("axon_nb.host" in line for line in command_lines(script.others())))
    script.process.kill()
    assert script.end() == -signal.SIGKILL
    assert until(lambda: not family(script.mark), timeout=90)


def test_rank_output_goes_to_the_scripts_streams() -> None:
    done: Finished = run_script(
        "import axon_nb\nwith axon_nb.start(2, devices='cpu') as c:\n"
        '    c.run(\'import sys\\nprint("out")\\nprint("err", rank, file=sys.stderr)\')'
    )
    assert by_rank(done.out) == {0: ["out"], 1: ["out"]}
    assert by_rank(done.err) == {0: ["err 0"], 1: ["err 1"]}


PROGRAMS = Path(__file__).resolve().parents[1] / "support" / "programs"
ARGUMENTS = {
    "trainer_class": "2 1",
    "nested_mains": "",
    "fully_sharded": "--steps 2",
    "flat_tensor_parallel": "",
    "small_language_model": "",
    "train_and_test": "--epochs 2",
    "reference_training": "--epochs 2 --opt sgd_nag",
    "one_long_script": "",
}
_LOSS = re.compile(r"rank \d .*loss .*")


@pytest.fixture(scope="module")
def kernel() -> Iterator[Kernel]:
    """A kernel with 2 ranks for all programs."""
    with Kernel() as kernel:
        kernel.ok("%load_ext axon_nb\n%distributed config threads=1\n%distributed start -n 2 --backend gloo")
        kernel.ok("%%distributed\nof_ranks = {'of_ranks', *globals()}")
        yield kernel
        kernel.run("%distributed stop")


def losses(text: str) -> list[str]:
    """The lines with losses, in an order that does not depend on which rank printed first."""
    return sorted(_LOSS.findall(text))


def run(script: Path, arguments: str) -> list[str]:
    """The losses of a script under torchrun; each rank writes a file, since their lines can mix on a shared pipe."""
    logs = script.with_suffix(".logs")
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    launch += ["--redirects", "1", "--log-dir", str(logs), str(script)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*launch, *arguments.split()], cwd=script.parent, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return losses("".join(path.read_text() for path in logs.rglob("stdout.log")))


_IN_EACH_RUN = ("trainer_class", "nested_mains", "fully_sharded")
_EACH = [pytest.param(name, marks=[] if name in _IN_EACH_RUN else pytest.mark.slow) for name in ARGUMENTS]


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", _EACH)
def test_imported_program_has_the_losses_of_the_original(name: str, kernel: Kernel, tmp_path: Path) -> None:
    for path in (PROGRAMS / f"{name}.py", PROGRAMS / "random_pairs.py"):
        shutil.copy(path, tmp_path)
    script, notebook, exported = (tmp_path / f"{name}{suffix}" for suffix in (".py", ".ipynb", "_again.py"))
    import_script(script, notebook, arguments=ARGUMENTS[name])
    cells = json.loads(notebook.read_text(encoding="utf-8"))["cells"]
    start, *sources = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    assert start == "%load_ext axon_nb\n%distributed start"
    kernel.ok(f"%%distributed\n%cd -q {tmp_path}\nfor name in globals().keys() - of_ranks:\n    del globals()[name]")
    on_ranks = losses("".join(kernel.ok(source).stdout for source in sources))
    export_notebook(notebook, exported)
    original = run(script, ARGUMENTS[name])
    assert len(original) >= 4
    assert on_ranks == original
    assert run(exported, "") == original
