"""A torch that axon_nb has not been tested with: the real one, which says that it is of another version."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.kernel.driver import Kernel

START = "%load_ext axon_nb\n%distributed config collective_timeout=20\n%distributed start -n 2 --devices cpu"
WARNING = "axon_nb has not been tested with torch 2.99.0"


@pytest.fixture(scope="module")
def kernel(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kernel]:
    """All processes of this notebook have that torch."""
    folder = tmp_path_factory.mktemp("other")
    (folder / "sitecustomize.py").write_text("import torch\ntorch.__version__ = '2.99.0'\n")
    path = os.pathsep.join([str(folder), str(Path.cwd()), os.environ.get("PYTHONPATH", "")])
    with Kernel(env={"PYTHONPATH": path}) as kernel:
        started = kernel.ok(START)
        assert started.stderr.count(WARNING) == 1
        assert "may wait for it for up to 20 s" in started.stderr
        kernel.ok("%%distributed\nimport os\nimport torch\nimport torch.distributed as dist\nx = torch.ones(2)")
        yield kernel


def test_its_own_groups_are_used_and_a_failure_leaves_the_others_to_their_time_limit(kernel: Kernel) -> None:
    shown = kernel.ok("%%distributed\ndist.all_reduce(x)\nprint(x.tolist(), type(dist.group.WORLD).__name__)")
    assert shown.lines() == ["[ranks 0-1] [2.0, 2.0] ProcessGroup"]
    failed = kernel.run("%%distributed\nif rank == 1:\n    raise ValueError('no')\ndist.all_reduce(x)")
    assert (failed.status, failed.evalue) == ("error", "rank 1: ValueError: no")
    assert failed.stderr.count("groups are not formed anew: if communication fails from here on") == 1
    assert "`%distributed restart` starts all ranks afresh." in failed.traceback
    assert "repair" not in failed.traceback


def test_ranks_cannot_be_replaced_and_the_sentence_says_so(kernel: Kernel) -> None:
    assert kernel.run("%%rank 1\nos._exit(3)").status == "error"
    refused = kernel.run("%distributed repair")
    assert refused.evalue.startswith("Ranks cannot be replaced with torch 2.99.0")
    assert "`%distributed restart` starts all ranks afresh" in refused.evalue
