"""The wheel in a clean environment outside the repository: what it brings, what it says, and that it runs."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

import pytest

from tests.packaging.conftest import Archives
from tests.packaging.environments import Environment, run, streams

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

LEARNED = re.compile("[0-9.]+% of 360 test digits are right")


@pytest.fixture(scope="module")
def installed(archives: Archives, make_environment: Callable[[], Environment]) -> Environment:
    """A clean environment with torch, as it is here, and the wheel: no extra."""
    environment = make_environment()
    environment.install(f"torch=={version('torch').partition('+')[0]}")
    environment.install(str(archives.wheel))
    return environment


def test_installed_wheel_is_consistent(installed: Environment) -> None:
    run([installed.python, "-m", "pip", "check"], cwd=installed.folder, env=installed.env)
    tell = [installed.python, "-c", "import axon_nb; print(axon_nb.__file__)"]
    found = run(tell, cwd=installed.folder, env=installed.env)
    assert Path(found.strip()).is_relative_to(installed.prefix)
    assert "usage: axon-nb" in run(["axon-nb", "--help"], cwd=installed.folder, env=installed.env)


def test_quickstart_command_copies_a_notebook_without_extras(installed: Environment) -> None:
    run(["axon-nb", "quickstart", "visit", "--no-open"], cwd=installed.folder, env=installed.env)
    folder, script = installed.folder / "visit", Path(__file__).with_name("first_visit.py")
    shutil.copy(script, folder)
    text = run([installed.python, script.name, "quickstart.ipynb"], cwd=folder, env=installed.env)
    assert LEARNED.search(text)
    assert installed.left_running() == []


def test_quickstart_runs_from_the_wheel(installed: Environment, archives: Archives) -> None:
    installed.install(f"{archives.wheel}[demo]")
    text = streams(installed.run_quickstart())
    assert LEARNED.search(text)
    files = re.findall("imported from (.*)", text)
    assert len(files) == 2, "once in the notebook, once for all ranks, which say the same"
    assert all(Path(file).is_relative_to(installed.prefix) for file in files), files
    assert installed.left_running() == []
    assert os.listdir(installed.home / "run" / f"axon_nb-{os.getuid()}") == []
