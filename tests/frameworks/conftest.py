"""Two ranks in a kernel, for all tests of frameworks: they import much, and each import takes seconds."""

from __future__ import annotations

import os
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.support.kernel import PROBE_S, Kernel, Reply

LIMIT_S = 500.0
"""Seconds that a cell may take: it may import a framework, or build what one needs; no test is about speed."""
TEST_LIMIT_S = 1200


class PatientKernel(Kernel):
    """As `Kernel`, and waits longer for its cells."""

    def run(self, code: str, *, timeout: float = LIMIT_S) -> Reply:
        """Run a cell to its end, whatever becomes of it."""
        return super().run(code, timeout=timeout)

    def ok(self, code: str, *, timeout: float = LIMIT_S) -> Reply:
        """Run a cell that must succeed."""
        return super().ok(code, timeout=timeout)


SETUP = """%%distributed
import copy, os
from torch import nn
from torch.nn import functional as F

generator = torch.Generator().manual_seed(7)
x, y = torch.randn(32, 6, generator=generator), torch.randn(32, 3, generator=generator)

def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 24), nn.Tanh(), nn.Linear(24, 24), nn.Tanh(), nn.Linear(24, 3))

def flat(model):
    return torch.cat([p.detach().double().flatten() for p in model.parameters()])

def trained_alone(optimizer, batches):
    '''One process that has all of each batch.'''
    model = net().to(batches[0][0].dtype)
    step = optimizer(model.parameters())
    for a, b in batches:
        step.zero_grad()
        F.mse_loss(model(a), b).backward()
        step.step()
    return flat(model)

def apart(own, wanted):
    '''(largest difference between ranks, from what is wanted, and how far that is from the start)'''
    others = [torch.zeros_like(own) for _ in range(world_size)]
    dist.all_gather(others, own)
    between = max((own - other).abs().max().item() for other in others)
    return between, (own - wanted).abs().max().item(), (wanted - flat(net())).abs().max().item()
"""
"""What every test finds on the ranks."""


@pytest.fixture(scope="session")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kernel]:
    """A kernel whose two ranks may build C++ and reach no hub."""
    folder = tmp_path_factory.mktemp("frameworks")
    env = {
        "HF_HUB_OFFLINE": "1",
        "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"),
        # DeepSpeed's build takes a minute: who runs these tests often names a folder that stays.
        "TORCH_EXTENSIONS_DIR": os.environ.get("TORCH_EXTENSIONS_DIR", str(folder / "extensions")),
    }
    with PatientKernel(cwd=folder, env=env) as kernel:
        kernel.load_and_warm_up()
        kernel.ok("%distributed start -n 2 --name frameworks")
        kernel.ok(SETUP)
        yield kernel


@pytest.fixture
def two(two_ranks: Kernel) -> Kernel:
    """The shared kernel, with two ranks that answer."""
    if not two_ranks.run("%%distributed\nflat(net()).numel()", timeout=PROBE_S).ok:
        two_ranks.ok("%distributed restart")
        two_ranks.ok(SETUP)
    return two_ranks


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip the tests of frameworks that are not here, and say which; the others have time."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.timeout(TEST_LIMIT_S))
        for marker in item.iter_markers("needs"):
            absent = [name for name in marker.args if find_spec(name) is None]
            if absent:
                item.add_marker(
                    pytest.mark.skip(reason=f"needs {', '.join(absent)}: docs/frameworks.md names the packages")
                )
