"""`%%plan`: a cell on ranks that do not exist."""

from __future__ import annotations

import pytest

from tests.support.kernel import Kernel

pytestmark = pytest.mark.timeout(600)

SETUP = """
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

width = 64

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(width, width)

    def forward(self, x):
        return self.layer(x)
"""
CELL = """%%plan -n 64 --card h100 --out planned
model = DistributedDataParallel(Net().to(device), device_ids=[local_rank])
optimizer = torch.optim.AdamW(model.parameters())
for _ in range(3):
    model(torch.randn(8, width, device=device)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def test_cell_is_planned_with_notebook_variables(kernel_for_clusters: Kernel) -> None:
    kernel = kernel_for_clusters
    kernel.ok(SETUP)
    reply = kernel.ok(CELL)
    text = "\n".join(bundle.get("text/plain", "") for bundle in reply.displays)
    assert "on 64 ranks of h100" in text
    assert "]:2 model = DistributedDataParallel" in text  # as the notebook numbers the lines
    assert "all_reduce" in text
    assert any("application/vnd.jupyter.widget-view+json" in bundle for bundle in reply.displays)  # the timeline
    assert kernel.value("[one.ranks == tuple(range(64)) for one in planned.ranks]") == [True]
    assert kernel.value("'model' in globals() or torch.distributed.is_initialized()") is False


def test_unplannable_cell_reports_cause(kernel_for_clusters: Kernel) -> None:
    kernel = kernel_for_clusters
    kernel.ok(f"{SETUP}\nimport threading\nlock = threading.Lock()")
    for cell, said in (
        ("%%plan -n 2\nif torch.ones(3).sum() > 2:\n    pass", "Line 2 of In ["),
        ("%%plan -n 2\nlock.acquire()", "The cell uses 'lock'"),
        ("%%plan -n 2 --card b1000\n1", "device must be one of"),
        ("%%plan -n 2\n# nothing", "%%plan needs the code that trains"),
        ("%%plan\n1", "-n"),
    ):
        reply = kernel.run(cell)
        assert not reply.ok
        assert said in reply.evalue, (cell, reply.evalue)
