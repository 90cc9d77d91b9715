"""Each parameter of `plan.memory` has the effect that it documents."""

from __future__ import annotations

from typing import Any

import cloudpickle
import pytest
import torch

from axon_nb.parallel.models import GPTConfig
from axon_nb.plan.footprint.plan import MemoryPlan, MemoryRequest, RankMemory
from axon_nb.plan.models import TensorSpec
from axon_nb.plan.process import run_in_process
from tests.plan.many import plans

pytestmark = pytest.mark.timeout(600)

CONFIG = GPTConfig(vocab=64, context=16, hidden=32, heads=2, blocks=2)
CASES: dict[str, dict[str, Any]] = {
    "base": {},
    "dtype": {"dtype": "bfloat16"},
    "mixed_precision": {"mixed_precision": "bfloat16"},
    "batch": {"batch": 8},
    "seq": {"batch": 8, "seq": 8},
    "activation_checkpointing": {"batch": 8, "activation_checkpointing": True},
    "optimizer": {"optimizer": "sgd"},
    "optimizer_options": {"optimizer": torch.optim.AdamW, "optimizer_options": {"amsgrad": True}},
    "world": {"mesh": {"dp": 8}},
    "inputs and loss": {"batch": 8, "inputs": TensorSpec(("batch", "seq"), "int64"), "seq": 16, "loss": torch.sum},
    "tp alone": {"mesh": {"tp": 2}},
}


@pytest.fixture(scope="module")
def ranks() -> dict[str, RankMemory]:
    """The worst rank of each case."""
    requests = {
        name: MemoryRequest(CONFIG, **{"mesh": {"dp": 4}, "strategy": "full_shard", "device": "cpu"} | given).check()
        for name, given in CASES.items()
    }
    found = run_in_process(plans, cloudpickle.dumps(requests))
    assert all(isinstance(made, MemoryPlan) for made in found.values()), found
    return {name: made.worst for name, made in found.items()}


def test_parameters_that_change_persistent_memory(ranks: dict[str, RankMemory]) -> None:
    held = {name: rank.persistent for name, rank in ranks.items()}
    base = held["base"]
    assert base.optimizer == 2 * base.parameters
    assert (held["dtype"].parameters, held["dtype"].gradients) == (base.parameters // 2, base.gradients // 2)
    assert held["mixed_precision"].model_states == held["batch"].model_states == base.model_states
    assert held["optimizer"].optimizer == 0
    assert held["optimizer_options"].optimizer == 3 * base.parameters
    assert base.parameters / 2 <= held["world"].parameters < base.parameters
    assert held["tp alone"].parameters > base.parameters


def test_parameters_that_change_the_peak(ranks: dict[str, RankMemory]) -> None:
    peak = {name: rank.peak for name, rank in ranks.items()}
    assert peak["mixed_precision"].total < peak["base"].total
    assert peak["batch"].activations > 4 * peak["base"].activations
    assert peak["seq"].activations < peak["batch"].activations
    assert peak["activation_checkpointing"].activations < peak["batch"].activations
    assert peak["inputs and loss"].total < peak["batch"].total
    assert peak["tp alone"].unsharded == 0
