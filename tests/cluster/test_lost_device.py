"""A rank that finds in a recovery that it lost its GPU: it is named, and a repair replaces it."""

from __future__ import annotations

from tests.support.script import Script

PROBLEM = "Rank 1 cannot use cuda:0 any more (a lost context). Run `%distributed repair --ranks 1`."
# As a rank on NCCL reports it; there is no GPU to lose here.
LOSE = f"""
from axon_nb.engine.groups import recovery
from axon_nb.records.protocol.recovery import RebuildReport
real, calls = recovery.recover, []
def recover(epoch, **options):
    calls.append(epoch)
    if len(calls) <= failures:
        raise RuntimeError("as planned")
    recovery.recover = real
    return RebuildReport(0, 0, 0, (), lost_device={PROBLEM!r} if rank == 1 else "")
recovery.recover = recover
"""
FAIL = "c.run('if rank == 0: raise ValueError(1)\\ndist.barrier()', quiet=True)"
SUM = "t = torch.ones(1); dist.all_reduce(t)\nt.item()"


def test_rank_that_lost_its_device_is_reported_and_replaced(script: Script) -> None:
    script.ok(f"c.run({'failures = 0' + LOSE!r}, quiet=True)")
    assert PROBLEM in script.run(FAIL).err
    refused = script.run(f"c.run({SUM!r}, quiet=True)")
    assert "rank 1 is without a CUDA context; run `%distributed repair` to replace it" in refused.message
    assert script.value("c.repair().ranks") == (1,)
    assert script.value(f"dict(c.run({SUM!r}, quiet=True).values)") == {0: 2.0, 1: 2.0}


def test_repair_reports_lost_device_and_the_next_one_replaces_it(script: Script) -> None:
    script.ok(f"c.run({'failures = 3' + LOSE!r}, quiet=True)")
    assert "The process groups could not be rebuilt." in script.run(FAIL).err
    answer = script.run("c.repair()")
    assert answer.kinds[0] == "StartError"
    assert f"The process groups were not rebuilt. {PROBLEM}" in answer.message
    assert script.value("c.repair().ranks") == (1,)
    assert script.value(f"dict(c.run({SUM!r}, quiet=True).values)") == {0: 2.0, 1: 2.0}
