"""A rank that runs out of memory says what held it, by role, and what sharding would save."""

from __future__ import annotations

import re

from tests.support.kernel import FreshCluster

TRAIN = """%%distributed
model = torch.nn.Linear(256, 256)
optimizer = torch.optim.Adam(model.parameters())
model(torch.ones(1, 256)).sum().backward()
optimizer.step()
def attend():
    scores = torch.zeros(1 << 20)  # held by this frame alone
    return torch.empty(1 << 60)"""


def test_rank_without_memory_names_what_holds_it(fresh_cluster: FreshCluster) -> None:
    kernel = fresh_cluster(2)
    kernel.ok(TRAIN)
    text = kernel.run("%%distributed\nif rank == 1:\n    attend()").traceback
    # 256 x 257 numbers of 4 bytes; Adam has two of each, and two step counters.
    found = re.search(
        r"Rank 1 ran out of memory; its tensors took (\S+ MiB) of \S+ GiB: (.*?)\.\s+With FSDP", text, re.S
    )
    assert found is not None, text
    # The copies are those for undo; with them come random states.
    parts = r"other 4\.0\d MiB, copies 1\.0\d MiB, optimizer 514 KiB, parameters 257 KiB, gradients 257 KiB"
    assert re.fullmatch(rf"6\.0\d MiB: {parts}", f"{found[1]}: {found[2]}"), text
    assert "parameters, gradients and optimizer states would take 514 KiB per rank instead of 1.00 MiB." in text
    assert "ran out of memory" not in kernel.run("%%distributed\nraise ValueError('no memory')").traceback
    kernel.ok("%%distributed\nmodel(torch.ones(1, 256)).sum().item()")
