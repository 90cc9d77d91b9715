"""Memory plans against published numbers."""

from __future__ import annotations

from functools import partial
from typing import Any

import cloudpickle
import pytest

from axon_nb import plan
from axon_nb.plan.footprint.plan import MemoryPlan, MemoryRequest
from axon_nb.plan.models import TensorSpec
from axon_nb.plan.process import run_in_process
from scripts.published_memory import MixedPrecisionAdam, linear_layers
from tests.plan.footprint.megatron import Layers
from tests.plan.many import plans

GB = 10**9


MODELS = {7.5: (750, 10_000, 1_000), 128.0: (256, 500_000, 1_000), 1000.0: (250, 4_000_000, 1_000)}
"""Layers, rows and columns, by billions of parameters."""
TABLE_1 = {
    ("ddp", 64): (120.0, 2048.0, 16000.0),
    ("optimizer_state", 4): (52.5, 896.0, 7000.0),
    ("optimizer_state", 16): (35.6, 608.0, 4750.0),
    ("optimizer_state", 64): (31.4, 536.0, 4187.0),
    ("optimizer_state", 256): (30.4, 518.0, 4046.0),
    ("optimizer_state", 1024): (30.1, 513.0, 4011.0),
    ("full_shard", 4): (30.0, 512.0, 4000.0),
    ("full_shard", 16): (7.5, 128.0, 1000.0),
    ("full_shard", 64): (1.88, 32.0, 250.0),
    ("full_shard", 256): (0.47, 8.0, 62.5),
    ("full_shard", 1024): (0.12, 2.0, 15.6),
}
"""GB per rank, of models of 7.5, 128 and 1000 billion parameters.

The table's middle column, optimizer states and gradients sharded and parameters whole, is of no strategy here: torch's
FSDP shards parameters between steps whatever it does within them.
"""


@pytest.mark.parametrize("billions", list(MODELS))
@pytest.mark.parametrize(("strategy", "world"), list(TABLE_1))
def test_model_states_of_the_zero_paper(strategy: str, world: int, billions: float) -> None:
    """Rajbhandari et al., ZeRO: Memory Optimizations Toward Training Trillion Parameter Models (2020), table 1."""
    made = plan.memory(
        partial(linear_layers, *MODELS[billions]),
        world,
        strategy=strategy,
        inputs=TensorSpec((1, 1_000)),
        optimizer=MixedPrecisionAdam,
        dtype="bfloat16",
        method="closed_form",
    )
    assert made.num_parameters == billions * GB
    gigabytes = TABLE_1[strategy, world][list(MODELS).index(billions)]
    # Layers are dealt out whole, 12 of 750 to the fullest of 64 ranks, and padded to whole rows.
    assert made.worst.persistent.total / GB == pytest.approx(gigabytes, rel=0.025, abs=0.005)


SEQ, BATCH, HIDDEN, HEADS = 128, 64, 256, 8


def _layers(count: int, **more: Any) -> MemoryRequest:
    return MemoryRequest(
        partial(Layers, HIDDEN, HEADS, count),
        {"dp": 1},
        "ddp",
        inputs=TensorSpec((BATCH, SEQ, HIDDEN), "bfloat16"),
        dtype="bfloat16",
        optimizer="SGD",
        device="cpu",
        extrapolate=False,
        **more,
    )


def test_activations_of_the_megatron_paper() -> None:
    """Korthikanti et al. (2022), equation 1 and section 5: bytes a layer without and with full recomputation."""
    requests = {
        f"{count}-{again}": _layers(count, activation_checkpointing=again or None)
        for count in (6, 7)
        for again in ("", "Layer")
    }
    found: dict[str, MemoryPlan] = run_in_process(plans, cloudpickle.dumps(requests))
    activations = {name: made.worst.peak.activations for name, made in found.items()}
    sbh = SEQ * BATCH * HIDDEN
    whole = activations["7-"] - activations["6-"]
    # Beside it the statistics of two norms, 4 bytes for each position, are kept; the paper leaves them out.
    assert whole == pytest.approx(sbh * (34 + 5 * HEADS * SEQ / HIDDEN), rel=0.01)
    assert activations["7-Layer"] - activations["6-Layer"] == pytest.approx(2 * sbh, rel=0.01)
