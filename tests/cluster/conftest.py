"""Scripts for the tests: one with 2 ranks for all that leave it as it was."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.script import Script


@pytest.fixture(scope="session")
def shared_script(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Script]:
    """A script with the cluster `c` of 2 ranks, for all tests of the session."""
    with Script(tmp_path_factory.mktemp("script")) as script:
        script.ok("import os, signal, sys, threading, axon_nb\nc = axon_nb.start(2, devices='cpu', name='script')")
        yield script


@pytest.fixture
def script(shared_script: Script) -> Script:
    """The shared script, with 2 ranks that answer."""
    if shared_script.run("c.run('1', quiet=True)").kinds:
        shared_script.ok("c.stop()\nc = axon_nb.start(2, devices='cpu', name='script')")
    return shared_script
