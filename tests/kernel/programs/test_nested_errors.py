"""Errors that IPython shows and swallows: they appear where they happen, and the cell fails."""

from __future__ import annotations

import os
import re
from pathlib import Path

from tests.support.kernel import Kernel, Reply

WORKS = "%%distributed\nt = torch.ones(1); dist.all_reduce(t); t.item()"


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
