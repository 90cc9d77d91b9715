"""Checkpoints in cells: an abort during a save, and the next save works."""

from __future__ import annotations

from pathlib import Path

from tests.support.script import Script

PREPARE = """
from axon_nb.parallel import DDP
from axon_nb.parallel.checkpoint import Checkpoints
torch.manual_seed(0)
model = DDP(torch.nn.Linear(4, 4))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
checkpoints = Checkpoints({folder!r})
def step():
    optimizer.zero_grad()
    model(torch.randn(8, 4)).square().mean().backward()
    optimizer.step()
step()
checkpoints.save(1, model=model, optimizer=optimizer)
"""
SAVE = "checkpoints.{how}({step}, model=model, optimizer=optimizer)"
RESUMED = """
resumed = checkpoints.load_latest(model=model, optimizer=optimizer)
step()
[resumed.step, sum(p.sum().item() for p in model.parameters()), checkpoints.steps()]
"""


def run(script: Script, code: str) -> str:
    """What is said about a cell."""
    return script.run(f"c.run({code!r}, quiet=True)").message


def test_aborted_save_keeps_the_previous_checkpoint(script: Script, tmp_path: Path) -> None:
    script.ok(f"c.run({PREPARE.format(folder=str(tmp_path))!r}, quiet=True)")
    for step, how in ((2, "save"), (3, "async_save")):
        # Rank 0 waits in the save for rank 1, which never comes.
        code = f"if rank == 1: raise RuntimeError('late')\n{SAVE.format(how=how, step=step)}"
        assert "RuntimeError: late" in run(script, code)
    first = script.value(f"c.run({RESUMED!r}, quiet=True).values")
    assert first[0][0] == 1
    assert first[0] == first[1]
    script.ok(f"c.run({SAVE.format(how='async_save', step=4)!r}, quiet=True)")
    script.ok("c.run('checkpoints.wait()', quiet=True)")
    again = script.value(f"c.run({RESUMED!r}, quiet=True).values")
    assert again[0][0] == 4
    assert again[0] == again[1]
    assert again[0][2] == [1, 4]
    assert sorted(item.name for item in tmp_path.iterdir()) == ["step_00000001", "step_00000004"]


def test_rank_death_during_background_save(script: Script, tmp_path: Path) -> None:
    script.ok(f"c.run({PREPARE.format(folder=str(tmp_path))!r}, quiet=True)")
    dying = "import os, signal\nif rank == 1: os.kill(os.getpid(), signal.SIGKILL)\ndist.barrier()"
    assert "SIGKILL" in run(script, f"{SAVE.format(how='async_save', step=2)}\n{dying}")
    script.ok("c.repair(from_rank=0)")
    reported = run(script, SAVE.format(how="save", step=3))
    if reported:  # it was not fast enough
        assert "The background save of step 2 failed: rank 1 was replaced and did not take part" in reported
        script.ok(f"c.run({SAVE.format(how='save', step=3)!r}, quiet=True)")
    resumed = script.value(f"c.run({RESUMED!r}, quiet=True).values")
    assert resumed[0] == resumed[1]
    assert resumed[0][2] == ([1, 3] if reported else [1, 2, 3])
