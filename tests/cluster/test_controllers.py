"""A controller that does not come up: told in one sentence, tried again where that helps, and nothing is left."""

from __future__ import annotations

from pathlib import Path

from tests.cluster.script import Script, command_lines
from tests.kernel.processes import until

SHADOW = """
import pathlib, sys
here = pathlib.Path(__file__).parent
if "--nodb" in sys.argv:  # a controller
    for told in sorted(here.glob("*.txt"))[:1]:
        text = told.read_text()
        if not text.startswith("always: "):
            told.unlink()
        raise OSError(text.removeprefix("always: "))
sys.path.remove(str(here.parent))
del sys.modules["ipyparallel"]
import ipyparallel
"""
"""Stands before the real package: a controller fails with the text of a file beside it, which is then used up."""


def shadow(folder: Path, *texts: str) -> str:
    """Lines of a script after which controllers fail like this, one after the other; `usual` is as it was."""
    package = folder / "ipyparallel"
    package.mkdir()
    (package / "__init__.py").write_text(SHADOW)
    for number, text in enumerate(texts):
        (package / f"{number}.txt").write_text(text)
    return (
        "import os, axon_nb\naxon_nb.start\nusual = os.environ['PYTHONPATH']\n"
        f"os.environ['PYTHONPATH'] = {str(folder)!r} + os.pathsep + usual"
    )


def test_a_controller_that_cannot_run_is_told_in_a_sentence_and_a_start_works_again(tmp_path: Path) -> None:
    with Script(tmp_path) as script:
        script.ok(shadow(tmp_path, "always: this one is broken"))
        for _ in range(2):
            answer = script.run("axon_nb.start(2, devices='cpu')")
            assert answer.kinds[0] == "StartError"
            assert answer.message == "The ipyparallel controller ended with exit status 1: OSError: this one is broken"
        assert until(lambda: not script.others()), command_lines(script.others())
        script.ok("os.environ['PYTHONPATH'] = usual\nc = axon_nb.start(2, devices='cpu')")
        assert script.value("dict(c.run('rank').values)") == {0: 0, 1: 1}


def test_a_port_that_was_taken_meanwhile_is_no_failure_the_first_time(tmp_path: Path) -> None:
    taken = "Address already in use (addr='tcp://127.0.0.1:40001')"
    with Script(tmp_path) as script:
        script.ok(shadow(tmp_path, taken, taken, taken))
        answer = script.run("axon_nb.start(2, devices='cpu')")
        assert answer.message == f"The ipyparallel controller ended with exit status 1: OSError: {taken}"
        script.ok("c = axon_nb.start(2, devices='cpu')")
        assert script.value("dict(c.run('rank').values)") == {0: 0, 1: 1}
