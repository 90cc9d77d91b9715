"""No optimizer step is begun while the cell is being ended; CUDA's part is in tests/gpu."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import torch

from axon_nb.engine.groups import creation
from axon_nb.engine.groups.abort import AbortedError, AbortFlag


@pytest.fixture
def abort() -> AbortFlag:
    return AbortFlag()


@pytest.fixture
def fenced(abort: AbortFlag) -> Iterator[torch.optim.Optimizer]:
    parameter = torch.nn.Parameter(torch.ones(2))
    parameter.grad = torch.ones(2)
    remove = creation.install_fence(abort)
    yield torch.optim.SGD([parameter], lr=1.0)
    remove()


def test_step_is_refused_while_abort_flag_is_set(fenced: torch.optim.Optimizer, abort: AbortFlag) -> None:
    fenced.step()
    (parameter,) = fenced.param_groups[0]["params"]
    assert parameter.tolist() == [0.0, 0.0]
    abort.set()
    with pytest.raises(AbortedError, match=r"aborted before optimizer.step"):
        fenced.step()
    assert parameter.tolist() == [0.0, 0.0]
    abort.clear(broken="rank 1 is dead")  # groups are broken: a step needs none
    fenced.step()
    assert parameter.tolist() == [-1.0, -1.0]


def test_pre_step_wait_ends_with_work_or_abort(abort: AbortFlag) -> None:
    looks = iter([False, False, True])
    creation.poll_until(lambda: next(looks), abort)
    threading.Timer(0.2, abort.set).start()
    with pytest.raises(AbortedError):
        creation.poll_until(lambda: False, abort)
