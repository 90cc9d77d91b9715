"""Bad arguments: one sentence with the rule, the value and the fix, before anything runs."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from axon_nb import plan
from axon_nb.errors import UsageError
from axon_nb.parallel import ShardingStrategy
from axon_nb.parallel.models import GPT, Block, GPTConfig
from axon_nb.plan.arguments import STRATEGIES

SMALL = GPTConfig(vocab=64, context=16, hidden=32, heads=2, blocks=2)
LINEAR = partial(nn.Linear, 8, 4)
SPEC = plan.TensorSpec(("batch", 8))


class OnCuda(nn.Module):
    """Requests CUDA in every possible way."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8, device="cuda").to("cuda:0", torch.bfloat16).to(device="cuda").cuda()
        self.register_buffer("shift", torch.zeros(8).cuda(0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Shape (batch, 8)."""
        return self.linear(x.to(torch.bfloat16)) + torch.arange(8, device="cuda")


def _fails() -> Any:
    raise ZeroDivisionError("division by zero")


MEMORY: list[tuple[Callable[..., Any], str]] = [
    (lambda: plan.memory(SMALL, "8"), "world_size must be a whole number of ranks, 1 or more; got '8'"),
    (lambda: plan.memory(SMALL, True), "world_size must be a whole number of ranks, 1 or more; got True"),
    (lambda: plan.memory(SMALL, mesh=4), "mesh must give the number of ranks per axis"),
    (lambda: plan.memory(SMALL, mesh={}), "The number of ranks is missing"),
    (lambda: plan.memory(SMALL, mesh={"dp": "2"}), "dp must be a whole number of ranks, 1 or more; got '2'"),
    (lambda: plan.memory(SMALL, 2, batch="4"), "batch must be a whole number, 1 or more; got '4'"),
    (lambda: plan.memory(SMALL, 2, batch=None), "batch must be a whole number, 1 or more; got None"),
    (lambda: plan.memory(SMALL, 2, ranks=[]), "one or more rank numbers"),
    (lambda: plan.memory(SMALL, 2, ranks=1.5), "ranks must be a whole number, 0 or more; got 1.5"),
    (lambda: plan.memory(SMALL, 2, fragmentation="5%"), "fragmentation must be a fraction of everything else"),
    (lambda: plan.memory(SMALL, 2, optimizer_options=3), "optimizer_options must be keyword arguments"),
    (lambda: plan.memory(SMALL, 2, loss="mse"), "loss must be a function of the output"),
    (lambda: plan.memory(SMALL, 2, keep_whole=True), "keep_whole needs strategy='shard_grad_op', dp as the only axis"),
    (
        lambda: plan.memory(SMALL, mesh={"tp": 2}, tp_plan=3),
        "tp_plan must be 'auto', or map module name patterns to styles; got 3",
    ),
    (lambda: plan.memory(SMALL, world=2), "world= is not an option; did you mean world_size="),  # type: ignore[call-arg]
    (lambda: plan.memory(SMALL, 2, offload="full"), "did you mean cpu_offload="),  # type: ignore[call-arg]
    (lambda: plan.memory(SMALL, 2, colour=1), "colour= is not an option; options are mesh, strategy"),  # type: ignore[call-arg]
    (lambda: plan.memory(SMALL, 2, optimizer=None, method="closed_form"), "optimizer=None: memory of a step needs"),
    (lambda: plan.memory(SMALL, 2, progress=True), "progress must be a function"),
    (lambda: plan.memory(SMALL, 2, cancel=True), "cancel must be a threading.Event"),
    (lambda: plan.memory("model", 2), "the ranks' variable 'model' needs a cluster"),
    (lambda: plan.memory("model", 2, cluster=3), "cluster must be a Cluster"),
    (lambda: plan.memory(GPTConfig, 2, method="closed_form"), r"model must be an instance of GPTConfig"),
    (lambda: plan.TensorSpec("batch", 8), "shape must be a tuple of sizes and names"),  # type: ignore[arg-type]
    (lambda: plan.TensorSpec(("batch", -1)), "shape must be a tuple of sizes and names"),
    (
        lambda: plan.memory(SMALL, 2, optimizer=_sgd(), method="closed_form"),
        "must be a class or a name, not an instance; got a SGD",
    ),
]
LAYOUTS: list[tuple[Callable[..., Any], str]] = [
    (lambda: _sent(batch=0), "batch must be a whole number, 1 or more; got 0"),
    (lambda: _sent(seq=99), r"seq must be at most the model's context, 16 tokens; got 99"),
    (lambda: _sent(microbatches=4), "microbatches= is not an option; did you mean num_microbatches="),
    (lambda: _sent(device="tpu"), "device must be one of cpu, cuda; got 'tpu'"),
    (lambda: _sent(bucket_size_mb=math.nan), "bucket_size_mb must be a number of MiB above 0; got nan"),
    (lambda: _sent(mixed_precision="int8"), "must be a floating-point dtype"),
    (lambda: _sent(num_microbatches=4), "num_microbatches=4 requires a pipeline"),
    (lambda: _sent(wrap="Layer"), "wrap='Layer' matches no module of GPT, which has Attention, Block"),
    (lambda: _sent(wrap=-1.5), "wrap must be a class, its name"),
    (lambda: _sent(optimizer=_sgd()), "must be a class or a name, not an instance; got a SGD"),
    (
        lambda: plan.communication(SMALL, mesh={"tp": 2}, tp_plan=None),
        "tp_plan must be 'auto', or map module name patterns to styles; got None",
    ),
    (lambda: plan.communication(LINEAR, 2, inputs=_fails), r"inputs= or target= failed \(ZeroDivisionError"),
    (lambda: plan.communication(LINEAR, 2, inputs=plan.TensorSpec((2, 8), "real")), "'real' is not a torch dtype"),
    (lambda: plan.communication(GPTConfig, 2), r"model must be an instance of GPTConfig"),
    (lambda: plan.schedule("1F1B", 4, 8).stages_of(9), "rank must be 0 to 3; got 9"),
    (lambda: plan.schedule("1F1B", 2, 8, plan.StageTimes("a", 2)), "got forward 'a' s"),  # type: ignore[arg-type]
    (lambda: plan.step_time(SMALL, 2, rates=1e9, links="nvlink4", overlap="half"), "overlap must be a fraction"),
    (lambda: plan.Rates(0), "flops_per_s must be a number of FLOP/s above 0; got 0"),
    (lambda: plan.Rates(1e12, -1), "bytes_per_s must be a number of bytes per second above 0"),
    (lambda: plan.Link("x", "1us", 3), "Link 'x': latency_s and call_s must be 0 or more"),  # type: ignore[arg-type]
    (lambda: plan.PRESETS["nvlink4"].scaled("80%"), "efficiency must be a fraction"),  # type: ignore[arg-type]
    (lambda: plan.search(SMALL, "64", 80), "num_gpus must be a whole number of ranks, 1 or more; got '64'"),  # type: ignore[arg-type]
    (lambda: plan.search(SMALL, 4, "80GB"), "memory_gib must be a number of GiB above 0, such as 80; got '80GB'"),  # type: ignore[arg-type]
    (lambda: plan.search(SMALL, 4, math.nan), "memory_gib must be a number of GiB above 0"),
    (lambda: plan.search(SMALL, 4, 80, max_tp=0), "max_tp must be a whole number, 1 or more; got 0"),
    (lambda: plan.search(SMALL, 4, 80, overlap=3), "overlap must be a fraction"),
    (
        lambda: plan.search(SMALL, 4, 80, strategies=["hybrid_shard"]),
        "strategies must be one of .*; got 'hybrid_shard'",
    ),
    (lambda: plan.calibrate(sizes=(1e6,)), "sizes must be a whole number of bytes"),  # type: ignore[arg-type]
    (lambda: plan.calibrate(operations="all_reduce"), "operations must be one or more of"),
    (lambda: plan.calibrate(repeats=2.5), "repeats must be a whole number"),  # type: ignore[arg-type]
    (lambda: plan.calibrate(budget_s="5s"), "budget_s must be seconds"),  # type: ignore[arg-type]
    (lambda: plan.calibrate(dtype=torch.int8), "dtype must be a floating-point dtype"),
    (lambda: plan.calibrate(strategies=("zero",)), "strategies must be one of .*; got 'zero'"),
    (lambda: plan.calibrate(cluster=3), "cluster must be a Cluster"),
]


def _sgd() -> torch.optim.Optimizer:
    return torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=1)


def _sent(**options: Any) -> Any:
    return plan.communication(SMALL, 2, **options)


@pytest.mark.parametrize(("call", "message"), MEMORY + LAYOUTS, ids=range(len(MEMORY + LAYOUTS)))
def test_bad_arguments_get_one_sentence(call: Callable[..., Any], message: str) -> None:
    with pytest.raises(UsageError, match=message) as caught:
        call()
    text = str(caught.value)
    assert "\n" not in text
    assert text.endswith((".", "?"))
    assert len(text) < 400


def test_model_input_mismatch_is_reported_in_one_sentence(capfd: pytest.CaptureFixture[str]) -> None:
    """Torch logs the traceback of a failed fake operation."""
    with pytest.raises(UsageError, match=r"check that inputs= and loss= fit it") as caught:
        plan.step_time(LINEAR, 1, inputs=torch.zeros(2, 9), rates=1e12)
    assert "\n" not in str(caught.value)
    assert capfd.readouterr().err == ""


def test_strategies_match_the_library() -> None:
    assert set(STRATEGIES) == {"ddp", *(strategy.value for strategy in ShardingStrategy)}


def test_models_that_request_cuda_are_planned_without_it() -> None:
    asked = plan.communication(OnCuda, 2, inputs=lambda: torch.ones(2, 8, device="cuda"), strategy="ddp")
    assert asked.bytes() == 2 * (8 * 8 + 8) + 4 * 8  # gradients of bfloat16, and a buffer
    states = plan.memory(OnCuda, 2, inputs=SPEC, method="closed_form", dtype="float32").worst.persistent
    assert states.parameters * 2 == 4 * (8 * 8 + 8)
    assert torch.nn.Linear(2, 2).to(torch.float64).weight.dtype is torch.float64


def test_equivalent_arguments_give_equal_plans() -> None:
    captured = plan.capture(GPT(SMALL))
    by_config = plan.communication(SMALL, 2)
    assert plan.communication(captured, np.int64(2)).by_operation() == by_config.by_operation()
    assert _sent(wrap="Block").by_operation() == _sent(wrap=[Block]).by_operation() == _sent(wrap=Block).by_operation()
    assert plan.search(captured, 2, 80, strategies="ddp").best == plan.search(SMALL, 2, 80, strategies=["ddp"]).best
    times = [[0.01, 0.02], [0.03, 0.04]]
    assert plan.schedule("GPipe", 2, 4, np.array(times)).step_s == plan.schedule("GPipe", 2, 4, times).step_s
    assert plan.schedule("GPipe", 2, 4, torch.tensor([0.5, 1.0])).times[1] == plan.StageTimes(0.5, 1.0)
    spec = plan.TensorSpec(["batch", np.int64(8)], torch.float32)  # type: ignore[arg-type]
    assert spec == plan.TensorSpec(("batch", 8), "float32")


def test_plans_state_their_zero_2_variant() -> None:
    """In torch's, parameters are sharded between steps; in the ZeRO paper's stage 2 they are whole."""
    for strategy in ("shard_grad_op", "full_shard"):
        says = [
            plan.memory(SMALL, 4, strategy=strategy, method="closed_form").notes,
            plan.step_time(SMALL, 4, strategy=strategy, rates=1e12, links="nvlink4").assumptions,
        ]
        for notes in says:
            assert any("torch's ZeRO-2" in note for note in notes) is (strategy == "shard_grad_op")
