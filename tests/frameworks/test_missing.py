"""A cell that imports what is not installed says how to get it."""

from __future__ import annotations

from tests.support.kernel import Kernel


def test_missing_package_is_reported_with_fix(two: Kernel) -> None:
    reply = two.run("%%distributed\nimport horovod.torch as hvd")
    assert "ModuleNotFoundError: No module named 'horovod'" in reply.traceback
    assert "`import axon_nb.compat.horovod as hvd`, which has its API." in reply.traceback.splitlines()[-1]
