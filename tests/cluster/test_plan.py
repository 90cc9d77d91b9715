"""Plans against real ranks: recorded communication equals the plan; calibrations return to the notebook."""

from __future__ import annotations

import pytest

from tests.support.script import Script
from tests.support.training.training_steps import CASES

RECORD = """
from axon_nb import plan
from axon_nb.records import spans as trace
from tests.support.training.training_steps import prepare
prepared = prepare({name!r})
position = trace.ring.position
prepared.step()
spans = trace.ring.since(position)[0]
prepared.pp_rank, plan.recorded_communication(spans, prepared.mesh)
"""


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.ranks == 2])
def test_calls_and_bytes_match_gloo_ranks(script: Script, name: str) -> None:
    expected = CASES[name].plan()
    values = script.value(f"c.run({RECORD.format(name=name)!r}, quiet=True).values")
    assert set(values) == {0, 1}
    for pp_rank, operations in values.values():
        assert operations == expected.by_operation(pp_rank=pp_rank)


def test_calibration_from_the_notebook(script: Script) -> None:
    code = (
        "from axon_nb import plan\n"
        "here = plan.calibrate(cluster=c, sizes=(4096, 65536), repeats=1)\n"
        "assert plan.communication(lambda: __import__('torch').nn.Linear(64, 64), 2, links=here).seconds() > 0\n"
        "sorted(here.links), here.where"
    )
    links, where = script.value(code)
    assert links == ["all"]
    assert where.startswith("2 ranks, gloo, cpu")
