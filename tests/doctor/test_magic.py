"""`%distributed doctor` in a real kernel prints what `axon-nb doctor` prints, of the kernel's own limits."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator

import pytest

from tests.support.kernel import Kernel

NAME = f"seen{os.getpid()}"
"""Other processes of this run may have a cluster of these tests, too."""


@pytest.fixture(scope="module")
def kernel(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kernel]:
    """A kernel with a cluster of 2 ranks."""
    with Kernel(cwd=tmp_path_factory.mktemp("doctor")) as kernel:
        kernel.ok("%load_ext axon_nb")
        kernel.ok(f"%distributed start -n 2 --name {NAME}")
        yield kernel


def test_doctor_magic_uses_the_kernels_limits(kernel: Kernel) -> None:
    reply = kernel.ok("%distributed doctor")
    assert "\naxon_nb " in reply.stdout
    assert "\nsoftware\n" in reply.stdout
    assert "\nlimits of this notebook's kernel\n" in reply.stdout
    assert reply.result == ""
    assert reply.stderr == ""


def test_doctor_magic_reports_its_cluster_as_in_use(kernel: Kernel) -> None:
    content = json.loads(kernel.ok("%distributed doctor --json").stdout)
    mine = {one["label"]: one for one in content["sections"]["clusters"]["findings"]}[NAME]
    assert mine["severity"] == "ok"
    assert "2 ranks, shm" in mine["value"]
    assert "in use by a notebook" in mine["value"]


def test_doctor_magic_leaves_ranks_unchanged(kernel: Kernel) -> None:
    kernel.ok("%%distributed\nkept = rank + 40")
    kernel.ok("%distributed doctor")
    assert sorted(kernel.ok("%%distributed\nkept").lines()) == ["[rank 0] 40", "[rank 1] 41"]


def test_bad_input_is_one_sentence(kernel: Kernel) -> None:
    reply = kernel.run("%distributed doctor --jsn")
    assert reply.ename == "UsageError"
    assert reply.evalue == "%distributed doctor has no '--jsn'; did you mean --json?"
    assert "did you mean `%distributed doctor`?" in kernel.run("%distributed docter").evalue
    assert kernel.ok("%distributed doctor --help").stdout.startswith("usage: %distributed doctor ")
