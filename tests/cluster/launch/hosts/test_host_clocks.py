"""Spans of ranks on a host with another clock are on the notebook's clock, and the timeline says how exactly."""

from __future__ import annotations

import pytest

from tests.cluster.launch.second_host import HERE_IN_OTHER_TIME, one_clock_only, start_with_joined_host
from tests.support.script import Script

_SPANS = """
table = c.spans.recorded()
calls = {}
for span in table.spans():
    if span.kind == "collective" and span.name == "all_reduce":
        calls.setdefault(span.sequence, []).append((span.start_ns, span.end_ns))
"""


def test_collectives_of_both_hosts_overlap_and_the_timeline_says_how_well(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    if reason := one_clock_only():
        pytest.skip(reason)
    with Script(tmp_path_factory.mktemp("clocks")) as script:
        script.ok(start_with_joined_host(HERE_IN_OTHER_TIME, "lo"), timeout=230)
        script.ok("c.run('for _ in range(20): dist.all_reduce(torch.ones(3))')")
        script.ok(_SPANS)
        assert script.value("sorted(set(map(len, calls.values())))") == [4]
        assert script.value("len(calls)") >= 20
        late_ns = script.value("max(max(s for s, _ in ends) - min(e for _, e in ends) for ends in calls.values())")
        assert late_ns < 1e6  # no rank leaves before the last one has entered
        assert 0 < script.value("table.clock_error_ns") < 1e8
        script.ok("from axon_nb.widgets.timeline.page import timeline_bundle")
        assert "The clocks of the hosts agree to ± " in script.value(
            "timeline_bundle(table, range(4), title='')['text/plain']"
        )
        script.ok("c.stop()")
