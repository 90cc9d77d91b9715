"""Ranks that see one MIG instance each: at the start, after a repair, and with launchers that cannot do it."""

from __future__ import annotations

from pathlib import Path

from tests.support.script import Script

# There is no card here: the ranks compute on the CPU, and the layout is that of two instances.
PLAN = """
import axon_nb
from axon_nb.cluster.launch.placement import Layout
from axon_nb.cluster.session import clusters
clusters.plan_layout = lambda *_, **__: Layout(2, "gloo", ("cpu", "cpu"), "MIG-a,MIG-b", 1, (), ("MIG-a", "MIG-b"))
"""
SEEN = "import os\nos.environ['CUDA_VISIBLE_DEVICES']"


def test_rank_and_its_replacement_see_one_mig_instance(tmp_path: Path) -> None:
    with Script(tmp_path) as script:
        script.ok(f"{PLAN}c = axon_nb.start(2)")
        for _ in range(2):
            assert script.value(f"dict(c.run({SEEN!r}, quiet=True).values)") == {0: "MIG-a", 1: "MIG-b"}
            assert script.value("c.repair('1').ranks") == (1,)


def test_other_launchers_reject_several_mig_instances(tmp_path: Path) -> None:
    with Script(tmp_path) as script:
        refused = script.run(f"{PLAN}axon_nb.start(2, engines='local')")
        assert refused.kinds[0] == "UsageError"
        assert "--engines local gives all ranks one MIG instance: use `--engines axon`, or `-n 1`." in refused.message
