"""Our DDP and its hooks in cells: an abort during a step and a replaced rank leave ranks alike."""

from __future__ import annotations

from tests.support.script import Script

PREPARE = """
from axon_nb.parallel import DDP, TopK
torch.manual_seed(0)
layers = [torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 4)]
model = DDP(torch.nn.Sequential(*layers), bucket_size_mb=0.0001)
hook = model.register_hook(TopK(0.5))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
def step():
    optimizer.zero_grad()
    model(torch.randn(8, 4)).square().mean().backward()
    optimizer.step()
for _ in range(3):
    step()
"""
SUMS = """
for _ in range(2):
    step()
[sum(p.sum().item() for p in model.parameters()), hook is model._comm_hooks[0][1]]
"""


def fails(script: Script, code: str) -> str:
    """What is said about a cell that fails on rank 1 while rank 0 is in a step."""
    answer = script.run(f"c.run({code!r}, quiet=True)")
    assert "CellError" in answer.kinds
    return answer.message


def test_hooks_survive_an_abort_and_a_replaced_rank(script: Script) -> None:
    script.ok(f"c.run({PREPARE!r}, quiet=True)")
    assert "RuntimeError: late" in fails(script, "if rank == 1: raise RuntimeError('late')\nstep()")
    after_abort = script.value(f"c.run({SUMS!r}, quiet=True).values")
    assert after_abort[0] == after_abort[1]
    assert "SIGKILL" in fails(script, "import os, signal\nif rank == 1: os.kill(os.getpid(), signal.SIGKILL)\nstep()")
    script.ok("c.repair(from_rank=0)")
    repaired = script.value(f"c.run({SUMS!r}, quiet=True).values")
    assert repaired[0] == repaired[1]
    assert repaired[0][1] is True
