"""A collective that is past its group's timeout, and nothing shows why: the cell ends and says so."""

from __future__ import annotations

from tests.support.script import Script

LATE = "all_reduce has been in progress for 1801 s, and its group's timeout is 1800 s"
# As a rank on NCCL reports it; groups on CPUs end at their timeout by themselves.
REPORT = f"""
from axon_nb.engine.groups.state import current_groups
from axon_nb.engine.groups import flight_recorder
class NoGroups:
    rebuilt_at_ns = 0
    def __getattr__(self, name):
        return lambda *arguments, **options: [] if name in ("all", "abort") else 0
if rank == 1:
    current_groups().native = NoGroups()
flight_recorder.overdue = lambda native, content: {LATE!r} if late else ""
late = False
"""


def test_cell_past_its_group_timeout_is_aborted(script: Script) -> None:
    script.ok(f"c.run({REPORT!r}, quiet=True)")
    answer = script.run("c.run('late = rank == 1\\nimport time\\nwhile late: time.sleep(0.1)', quiet=True)", timeout=60)
    assert f"rank 1: {LATE}. Nothing shows what it waits for." in answer.message
    script.ok("c.stop()\nc = axon_nb.start(2, devices='cpu', name='script')")
