"""`plan.capture` and bare captures of `%memory`: a model as it was before wrapping; the effect of each parameter."""

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
from axon_nb.parallel import checkpoint_blocks
from axon_nb.parallel.models import GPT, Block, GPTConfig
from axon_nb.plan.errors import CaptureError
from axon_nb.plan.footprint.plan import MemoryPlan, MemoryRequest, RankMemory
from axon_nb.plan.models import CapturedModel, TensorSpec
from axon_nb.plan.process import run_in_process
from axon_nb.plan.skeleton import capture, capture_or_reason, inner_model, is_recomputed, plain_class
from tests.plan.footprint.wrapped import described, plain, seen
from tests.plan.many import plans


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


def made(model: nn.Module, device: str = "meta") -> Any:
    """A model from the bare capture of another."""
    with torch.device(device):
        return pickle.loads(capture(model, bare=True).factory)()


def shapes(model: nn.Module) -> dict[str, Any]:
    """Of all parameters and buffers, with what else belongs to them."""
    tensors = (*model.named_parameters(remove_duplicate=False), *model.named_buffers())
    return {name: (type(own), tuple(own.shape), own.dtype, own.requires_grad) for name, own in tensors}


class Tied(nn.Module):
    """Two names of one parameter, a buffer, one that is not saved, and a plain attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4, bias=False)
        self.second.weight = self.first.weight
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.register_buffer("table", torch.ones(3), persistent=False)
        self.scale = 2.0
        self.first.bias.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(…, 4) to the same shape."""
        return self.scale * self.second(self.first(x))


def test_model_is_rebuilt_without_its_data() -> None:
    for model in (GPT(GPTConfig(blocks=2)), Tied(), nn.Sequential(nn.BatchNorm1d(3), nn.LSTM(3, 2))):
        again = made(model)
        assert type(again) is type(model)
        assert shapes(again) == shapes(model)
        assert list(again.state_dict()) == list(model.state_dict())
    tied = made(Tied())
    assert tied.first.weight is tied.second.weight
    assert all(own.device.type == "meta" for own in tied.parameters())
    assert made(Tied(), "cpu")(torch.ones(2, 4)).shape == (2, 4)


def test_bare_capture_is_small_for_any_model() -> None:
    small, large = (capture(nn.Linear(size, size), bare=True).factory for size in (4, 4000))
    assert len(large) < len(small) + 20 < 4000


def test_hooks_and_checkpointed_forwards_are_left_out() -> None:
    model = GPT(GPTConfig(blocks=2))
    model.register_forward_hook(lambda *_: None)
    assert checkpoint_blocks(model, Block) == 2
    assert [is_recomputed(own) for own in model.children()] == [False, True, True, False]
    again = made(model, "cpu")
    assert not again._forward_hooks
    assert not any(map(is_recomputed, again.modules()))
    assert again(torch.zeros(1, 4, dtype=torch.int64)).shape == (1, 4, 256)
    wrapped = nn.Sequential(checkpoint_wrapper(nn.Linear(2, 2)), nn.Linear(2, 2))
    assert is_recomputed(wrapped[0])
    assert plain_class(wrapped[0]) is nn.Linear
    assert list(shapes(made(wrapped))) == ["0.weight", "0.bias", "1.weight", "1.bias"]


def test_compiled_models_are_captured_uncompiled() -> None:
    model = nn.Linear(3, 3)
    compiled: Any = torch.compile(model, backend="eager")
    assert inner_model(compiled) is model


def test_uncapturable_model_is_reported_in_one_sentence() -> None:
    lazy = nn.Sequential(nn.LazyLinear(4))
    with pytest.raises(CaptureError, match="The model has uninitialized lazy parameters: run it once"):
        capture(lazy, bare=True)
    model: Any = nn.Linear(2, 2)
    model.lines = (line for line in ())
    with pytest.raises(CaptureError, match="model, a Linear, cannot be captured") as caught:
        capture(model, bare=True)
    assert "\n" not in str(caught.value)


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
