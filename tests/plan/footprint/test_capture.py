"""`plan.capture`: a model's classes and shapes, as it was before wrapping."""

from __future__ import annotations

import pickle
import threading
from typing import Any

import cloudpickle
import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from axon_nb import plan
from axon_nb.parallel.models import GPT, GPTConfig
from axon_nb.plan.models import CapturedModel, TensorSpec
from axon_nb.plan.process import run_in_process
from axon_nb.plan.skeleton import capture_or_reason
from tests.plan.footprint.wrapped import described, plain, seen


def _made(captured: CapturedModel) -> Any:
    return pickle.loads(captured.factory)()


def test_values_are_not_captured() -> None:
    captured = plan.capture(nn.Linear(2000, 2000), "net")
    assert captured.name == "net"
    assert len(captured.factory) < 10_000
    assert _made(captured).weight.shape == (2000, 2000)


def test_wrappers_are_undone() -> None:
    found = run_in_process(seen, cloudpickle.dumps(None))
    expected = described(plain())
    for name in ("plain", "fully_shard", "unsharded", "two axes", "ddp", "FSDP"):
        assert found[name] == (expected, (2, 8, 67)), name
    again, shape = found["checkpointed"]
    assert shape == (2, 8, 67)
    assert again["block0 itself"][3] == sorted(["forward", *expected["block0 itself"][3]])


def test_modules_with_flattened_weight_references() -> None:
    model = nn.LSTM(4, 3, num_layers=2)
    output, _ = _made(plan.capture(model))(torch.zeros(5, 1, 4))
    assert output.shape == (5, 1, 3)


def test_blocks_wrapped_individually() -> None:
    def blocks() -> list[nn.Module]:
        return [nn.Linear(4, 4), nn.Linear(4, 4)]

    checkpointed = nn.Sequential(*map(checkpoint_wrapper, blocks()))
    compiled = nn.Sequential(*(torch.compile(block, backend="eager") for block in blocks()))  # type: ignore[arg-type]
    for model in (checkpointed, compiled):
        again = _made(plan.capture(model))
        assert again(torch.zeros(2, 4)).shape == (2, 4)
        assert sum(own.numel() for own in again.parameters()) == 40


def test_parametrized_modules() -> None:
    again = _made(plan.capture(torch.nn.utils.parametrizations.weight_norm(nn.Linear(4, 3))))
    assert again(torch.zeros(2, 4)).shape == (2, 3)
    assert [tuple(own.shape) for own in again.parametrizations.weight.parameters()] == [(3, 1), (3, 4)]


class _WithLock(nn.Linear):
    """Leaves out of a pickle what it makes again."""

    def __init__(self) -> None:
        super().__init__(2, 2)
        self.lock: Any = threading.Lock()

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "lock": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__({**state, "lock": threading.Lock()})


def test_custom_pickling_of_a_module_is_used() -> None:
    with _made(plan.capture(_WithLock())).lock:
        pass


def test_user_hooks_are_kept() -> None:
    model = nn.Linear(2, 2)
    model.register_forward_hook(lambda module, args, output: output.repeat(1, 2))
    assert _made(plan.capture(model))(torch.zeros(1, 2)).shape == (1, 4)


def test_module_instance_can_be_planned() -> None:
    spec = TensorSpec(("batch", 8))
    whole = plan.memory(nn.Linear(8, 4), 2, inputs=spec, method="closed_form")
    assert whole.ranks == plan.memory(lambda: nn.Linear(8, 4), 2, inputs=spec, method="closed_form").ranks
    config = GPTConfig(vocab=64, context=16, hidden=32, heads=2, blocks=1)
    named = plan.memory(GPT(config), 2, method="closed_form")
    assert named.model == "GPT"
    assert named.num_parameters == plan.memory(config, 2, method="closed_form").num_parameters


def test_capture_errors() -> None:
    locked = nn.Linear(2, 2)
    locked.lock = threading.Lock()  # type: ignore[assignment]
    with pytest.raises(plan.PlanError, match=r"net, a Linear, cannot be captured \(TypeError.*give a function"):
        plan.capture(locked, "net")
    with pytest.raises(plan.PlanError, match="uninitialized lazy parameters"):
        plan.capture(nn.LazyLinear(3))
    with pytest.raises(plan.PlanError, match=r"must be a torch\.nn\.Module; it has type list"):
        plan.capture([1])  # type: ignore[arg-type]


def test_rank_reports_why_it_has_no_model() -> None:
    space: dict[str, Any] = {"net": nn.Linear(2, 2), "number": 3}
    assert isinstance(capture_or_reason(lambda: space["net"], "net"), CapturedModel)
    assert capture_or_reason(lambda: space["other"], "other") == "'other' does not exist ('other')"
    assert capture_or_reason(lambda: space["number"], "number") == "number must be a torch.nn.Module; it has type int."


@pytest.mark.parametrize("name", ["f()", "a b", "", "net[i]", "a.b()", "__import__('os')", "1"])
def test_names_cannot_call_anything(name: str) -> None:
    with pytest.raises(plan.PlanError, match="a variable on the ranks, such as 'model'"):
        plan.memory(name, 2)


def test_name_requires_ranks() -> None:
    with pytest.raises(Exception, match="needs a cluster, but none is running") as raised:
        plan.memory("model", 2)
    assert type(raised.value).__name__ == "NoClusterError"
