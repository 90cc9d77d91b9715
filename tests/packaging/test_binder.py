"""Binder's own files make an environment in which the quickstart runs, on what Binder gives: one core and 2 GiB."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.request import urlopen

import pytest
import yaml

from tests.packaging.environments import ROOT, Environment, publish, run, streams
from tests.packaging.memory import memory_limit

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

MEMORY = 2 * 1024**3
SERVER_LIMIT = 60.0
"""Seconds until a Jupyter server answers."""


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The repository as Binder clones it, from its address."""
    folder = tmp_path_factory.mktemp("clone") / "axon_nb"
    made = (".git", ".venv", "build", "dist", "out", "__pycache__", ".*_cache", ".hypothesis")
    shutil.copytree(ROOT, folder, symlinks=True, ignore=shutil.ignore_patterns(*made))
    publish(folder)
    return folder


@pytest.fixture(scope="module")
def binder(tree: Path, make_environment: Callable[[], Environment]) -> Environment:
    """As near as pip comes to conda: the torch of environment.yml, Jupyter as Binder has it, then postBuild itself."""
    packages = yaml.safe_load((tree / "binder" / "environment.yml").read_text(encoding="utf-8"))["dependencies"]
    (torch,) = [package for package in packages if package.startswith("pytorch-cpu=")]
    environment = make_environment()
    environment.install(torch.replace("pytorch-cpu=", "torch=="))
    environment.install("jupyterlab", "notebook")
    env = {name: value for name, value in environment.env.items() if name != "PIP_CONSTRAINT"}
    run([str(tree / "binder" / "postBuild")], cwd=tree, env=env)
    return environment


@contextmanager
def jupyter_server(environment: Environment, tree: Path, application: str) -> Iterator[str]:
    """A server of JupyterLab or Notebook, started in the clone; its address."""
    command = ["jupyter", application, "--no-browser", "--port=0", "--IdentityProvider.token=", "--allow-root"]
    with (environment.folder / "server.log").open("w") as log:
        server = subprocess.Popen(command, cwd=tree, env=environment.env, stdout=log, stderr=subprocess.STDOUT)
        try:
            limit = time.monotonic() + SERVER_LIMIT
            while not (files := list(environment.home.rglob(f"jpserver-{server.pid}.json"))):
                assert server.poll() is None, (environment.folder / "server.log").read_text()
                assert time.monotonic() < limit, (environment.folder / "server.log").read_text()
                time.sleep(0.1)
            yield json.loads(files[0].read_text(encoding="utf-8"))["url"]
        finally:
            server.terminate()
            server.wait(SERVER_LIMIT)


@pytest.mark.parametrize("application", ["lab", "notebook", "server"])
def test_badge_and_server_open_the_quickstart(binder: Environment, tree: Path, application: str) -> None:
    readme = (tree / "README.md").read_text(encoding="utf-8")
    (path,) = re.findall(r"https://mybinder\.org/v2/gh/[\w-]+/[\w-]+/HEAD\?urlpath=([\w./]+)", readme)
    with jupyter_server(binder, tree, application) as url:
        with urlopen(url) as landing:
            assert landing.url == f"{url}{path}"
        with urlopen(f"{url}api/contents/{path.removeprefix('lab/tree/')}") as contents:
            assert json.load(contents)["type"] == "notebook"
    assert binder.left_running() == []


def test_quickstart_runs_on_one_core_with_2_gib(binder: Environment, record_property: Callable[..., None]) -> None:
    core = min(os.sched_getaffinity(0))
    began = time.monotonic()
    with memory_limit(MEMORY, binder.processes) as limit:
        notebook = binder.run_quickstart([*limit.prefix, "taskset", "--cpu-list", str(core)])
        left = binder.left_running()
    took = time.monotonic() - began
    print(f"{limit.kind}: {limit.peak / 2**20:.0f} MiB at most, {took:.0f} s on one core")
    record_property("peak_mib", limit.peak // 2**20)
    assert left == []
    assert re.search("[0-9.]+% of 360 test digits are right", streams(notebook))
    assert limit.kills == 0
    assert 0 < limit.peak <= MEMORY
