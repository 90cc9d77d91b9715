"""A tensor-parallel model in cells: a step that is aborted and run again gives the same result."""

from __future__ import annotations

from tests.support.script import Script

PREPARE = """
from axon_nb.parallel import parallel_cross_entropy, parallelize
from axon_nb.parallel.models import GPT, GPTConfig
torch.manual_seed(rank)
model = GPT(GPTConfig(vocab=32, context=8, hidden=16, heads=4, blocks=2))
report = parallelize(model, "auto", sequence=True, parallel_loss=True)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
drawn = torch.randint(32, (3, 9), generator=torch.Generator().manual_seed(5))
def step(fail=False):
    optimizer.zero_grad()
    loss = parallel_cross_entropy(model(drawn[:, :-1]), drawn[:, 1:])
    if fail and rank == 1:
        raise RuntimeError("late")
    loss.backward()
    optimizer.step()
    return loss.item()
[step() for _ in range(2)]
"""


def test_rerun_of_aborted_step_gives_the_same_result(script: Script) -> None:
    script.ok(f"c.run({PREPARE!r}, quiet=True)")
    expected = script.value("c.run('[step() for _ in range(2)]', quiet=True).values")
    assert expected[0] == expected[1]
    script.ok(f"c.run({PREPARE!r}, quiet=True)")
    answer = script.run("c.run('step(fail=True)', quiet=True)")
    assert "CellError" in answer.kinds
    assert "RuntimeError: late" in answer.message
    assert script.value("c.run('[step() for _ in range(2)]', quiet=True).values") == expected
