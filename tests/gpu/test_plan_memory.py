"""Memory plans for a GPU against CUDA's allocator."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cloudpickle
import pytest

from axon_nb.parallel.models import Block
from axon_nb.plan.footprint.plan import MemoryPlan, MemoryRequest
from axon_nb.plan.process import run_in_process
from tests.gpu.card_peaks import BATCH, CONFIG, Case, reported
from tests.plan.many import plans

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]

# Autocast, which DDP computes with, has other lists of operations on GPUs than on CPUs: DDP in float32 alone.
CASES = [
    Case(strategy, mixed, again)
    for strategy in ("ddp", "full_shard", "shard_grad_op")
    for mixed in (False, True)
    for again in (False, True)
    if not (mixed and strategy == "ddp")
]


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> dict[str, int]:
    """Peak bytes of each case on the GPU."""
    ended = subprocess.run(
        [sys.executable, "-m", "tests.gpu.card_peaks", str(tmp_path_factory.mktemp("card") / "store"), reported(CASES)],
        cwd=Path(__file__).resolve().parents[2],
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr[-4000:]
    found: dict[str, int] = json.loads(ended.stdout.splitlines()[-1])
    return found


@pytest.fixture(scope="module")
def planned() -> dict[str, Any]:
    """The plan of each case."""
    requests = {
        case.name: MemoryRequest(
            CONFIG,
            {"dp": 1},
            case.strategy,
            optimizer="AdamW",
            mixed_precision="bfloat16" if case.mixed else None,
            activation_checkpointing=Block if case.again else None,
            batch=BATCH,
        )
        for case in CASES
    }
    found: dict[str, Any] = run_in_process(plans, cloudpickle.dumps(requests))
    return found


@pytest.mark.parametrize("name", [case.name for case in CASES])
def test_planned_peak_matches_the_gpu(
    name: str, real: dict[str, int], planned: dict[str, Any], record_property: Callable[[str, object], None]
) -> None:
    plan = planned[name]
    assert isinstance(plan, MemoryPlan), plan
    record_property("planned_bytes", plan.peak_bytes)
    record_property("measured_bytes", real[name])
    assert plan.peak_bytes == pytest.approx(real[name], rel=0.05)
