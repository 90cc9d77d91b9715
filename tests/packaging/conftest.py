"""The archives of the project, built once: from its folder, and the wheel from the source archive too."""

from __future__ import annotations

import os
import shutil
import sys
import tarfile
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.packaging.environments import ROOT, Environment, run


@dataclass(frozen=True)
class Archives:
    """What `make dist` makes, and what can be made from it."""

    source: Path
    wheel: Path
    unpacked: Path
    """The folder that the source archive holds."""
    wheel_of_source: Path
    """The wheel that is built from `unpacked`."""


@pytest.fixture(scope="session")
def archives(tmp_path_factory: pytest.TempPathFactory) -> Archives:
    """Built without isolation: hatchling and its plugin are among what development needs."""
    folder = tmp_path_factory.mktemp("archives")
    build = [sys.executable, "-m", "build", "--no-isolation", "--outdir"]
    tree, again = folder / "tree", folder / "again"
    run([*build, str(tree), "--sdist", "--wheel", str(ROOT)], cwd=folder, env=dict(os.environ))
    (source,), (wheel,) = tree.glob("*.tar.gz"), tree.glob("*.whl")
    with tarfile.open(source) as archive:
        archive.extractall(folder / "unpacked", filter="data")
    (unpacked,) = (folder / "unpacked").iterdir()
    run([*build, str(again), "--wheel", str(unpacked)], cwd=folder, env=dict(os.environ))
    (wheel_of_source,) = again.glob("*.whl")
    return Archives(source, wheel, unpacked, wheel_of_source)


@pytest.fixture(scope="module")
def make_environment() -> Iterator[Callable[[], Environment]]:
    """Makes clean environments, in folders of short names: Unix sockets live below them."""
    folders: list[Path] = []

    def make() -> Environment:
        folders.append(Path(tempfile.mkdtemp(prefix="axp-")))
        return Environment(folders[-1])

    yield make
    for folder in folders:
        shutil.rmtree(folder)
