"""A controller that fails to start: one sentence, another try where that helps, and nothing left behind."""

from __future__ import annotations

from pathlib import Path

from tests.support.processes import until
from tests.support.script import Script, command_lines

TAKEN = "Address already in use (addr='tcp://127.0.0.1:40001')"
SHADOW = """
import pathlib, sys
here = pathlib.Path(__file__).parent
if "--nodb" in sys.argv:  # a controller
    for file in sorted(here.glob("*.txt"))[:1]:
        text = file.read_text()
        file.unlink()
        raise OSError(text)
sys.path.remove(str(here.parent))
del sys.modules["ipyparallel"]
import ipyparallel
"""
"""Stands before the real package: a controller fails with the text of a file beside it, which is then used up."""


def test_taken_port_is_retried_once_then_reported(tmp_path: Path) -> None:
    package = tmp_path / "ipyparallel"
    package.mkdir()
    (package / "__init__.py").write_text(SHADOW)
    for number in range(3):
        (package / f"{number}.txt").write_text(TAKEN)
    with Script(tmp_path) as script:
        script.ok(
            "import os, axon_nb\naxon_nb.start\n"
            f"os.environ['PYTHONPATH'] = {str(tmp_path)!r} + os.pathsep + os.environ['PYTHONPATH']"
        )
        answer = script.run("axon_nb.start(2, devices='cpu')")
        assert answer.kinds[0] == "StartError"
        assert answer.message == f"The ipyparallel controller exited with code 1: OSError: {TAKEN}"
        assert until(lambda: not script.others()), command_lines(script.others())
        script.ok("c = axon_nb.start(2, devices='cpu')")
        assert script.value("dict(c.run('rank').values)") == {0: 0, 1: 1}
    assert not list(package.glob("*.txt"))
