"""However a script ends, its cluster ends soon after."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import psutil
import pytest

from tests.support.output_lines import by_rank
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
