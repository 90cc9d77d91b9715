"""What is asked for by mistake: one sentence with the value, the rule and the fix, before anything runs."""

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
from axon_nb.plan.mesh_axes import STRATEGIES

SMALL = GPTConfig(vocab=64, context=16, hidden=32, heads=2, blocks=2)
LINEAR = partial(nn.Linear, 8, 4)
SPEC = plan.TensorSpec(("batch", 8))


class OnCard(nn.Module):
    """Written for a card, in all the ways there are."""

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
    (lambda: plan.memory(SMALL, "8"), "world_size='8': it is a whole number of ranks"),
    (lambda: plan.memory(SMALL, True), "world_size=True: it is a whole number of ranks"),
    (lambda: plan.memory(SMALL, mesh=4), "mesh=4: it is the number of ranks by axis"),
    (lambda: plan.memory(SMALL, mesh={}), "how many ranks"),
    (lambda: plan.memory(SMALL, mesh={"dp": "2"}), "dp='2': it is a whole number of ranks"),
    (lambda: plan.memory(SMALL, 2, batch="4"), "batch='4': it is a whole number, 1 or more"),
    (lambda: plan.memory(SMALL, 2, batch=None), "batch=None: it is a whole number"),
    (lambda: plan.memory(SMALL, 2, ranks=[]), "the numbers of one rank or more"),
    (lambda: plan.memory(SMALL, 2, ranks=1.5), "ranks=1.5: it is a whole number, 0 or more"),
    (lambda: plan.memory(SMALL, 2, fragmentation="5%"), "fragmentation='5%': it is a share"),
    (lambda: plan.memory(SMALL, 2, optimizer_options=3), "optimizer_options=3: keyword arguments"),
    (lambda: plan.memory(SMALL, 2, loss="mse"), "loss='mse': it is a function"),
    (lambda: plan.memory(SMALL, mesh={"tp": 2}, tp_plan=3), "tp_plan=3: 'auto', or patterns"),
    (lambda: plan.memory(SMALL, 2, progress=True), "progress=True: it is a function"),
    (lambda: plan.memory(SMALL, 2, cancel=True), "cancel=True: it is a threading.Event"),
    (lambda: plan.memory("model", 2), "the ranks' variable 'model' needs a cluster"),
    (lambda: plan.memory("model", 2, cluster=3), "cluster=3: it is a cluster"),
    (lambda: plan.memory(GPTConfig, 2, method="closed_form"), r"give one of it, GPTConfig\(…\)"),
    (lambda: plan.TensorSpec("batch", 8), "the shape is a tuple of sizes and names"),  # type: ignore[arg-type]
    (lambda: plan.TensorSpec(("batch", -1)), "the shape is a tuple of sizes and names"),
    (lambda: plan.memory(SMALL, 2, optimizer=_sgd(), method="closed_form"), "a SGD that is made already"),
]
LAYOUTS: list[tuple[Callable[..., Any], str]] = [
    (lambda: _sent(batch=0), "batch=0: it is a whole number, 1 or more"),
    (lambda: _sent(seq=99), r"seq=99: the model's context is 16 tokens; GPTConfig\(context=99\)"),
    (lambda: _sent(device="tpu"), "device='tpu': it is one of cpu, cuda"),
    (lambda: _sent(bucket_size_mb=math.nan), "bucket_size_mb=nan: it is a number of MiB above 0"),
    (lambda: _sent(mixed_precision="int8"), "a dtype of floating point numbers"),
    (lambda: _sent(num_microbatches=4), "num_microbatches=4 without pp"),
    (lambda: _sent(wrap="Layer"), "wrap='Layer': GPT has none; its modules are Attention, Block"),
    (lambda: _sent(wrap=-1.5), "wrap=-1.5: a class, its name"),
    (lambda: _sent(optimizer=_sgd()), "a SGD that is made already: give its class, or its name"),
    (lambda: plan.communication(SMALL, mesh={"tp": 2}, tp_plan=None), "tp_plan=None: 'auto', or patterns"),
    (lambda: plan.communication(LINEAR, 2, inputs=_fails), "inputs= or target= cannot be made: ZeroDivisionError"),
    (lambda: plan.communication(LINEAR, 2, inputs=plan.TensorSpec((2, 8), "real")), "'real' is no dtype of torch"),
    (lambda: plan.communication(GPTConfig, 2), r"give one of it, GPTConfig\(…\)"),
    (lambda: plan.schedule("1F1B", 4, 8).stages_of(9), "rank 9: there are 4 ranks, 0 to 3"),
    (lambda: plan.schedule("1F1B", 2, 8, plan.StageTimes("a", 2)), "forward 'a' s"),  # type: ignore[arg-type]
    (lambda: plan.step_time(SMALL, 2, rates=1e9, links="nvlink4", overlap="half"), "overlap='half': it is a share"),
    (lambda: plan.Rates(0), "flops_per_s=0: it is floating point operations a second"),
    (lambda: plan.Rates(1e12, -1), "bytes_per_s=-1: it is bytes a second"),
    (lambda: plan.Link("x", "1us", 3), "link 'x': latency '1us' s"),  # type: ignore[arg-type]
    (lambda: plan.PRESETS["nvlink4"].scaled("80%"), "efficiency='80%': a share"),  # type: ignore[arg-type]
    (lambda: plan.search(SMALL, "64", 80), "num_gpus='64': it is a whole number of ranks"),  # type: ignore[arg-type]
    (lambda: plan.search(SMALL, 4, "80GB"), "memory='80GB': it is how many GiB"),  # type: ignore[arg-type]
    (lambda: plan.search(SMALL, 4, math.nan), "memory=nan: it is how many GiB"),
    (lambda: plan.search(SMALL, 4, 80, max_tp=0), "max_tp=0: it is a whole number, 1 or more"),
    (lambda: plan.search(SMALL, 4, 80, overlap=3), "overlap=3: it is a share"),
    (lambda: plan.search(SMALL, 4, 80, strategies=["hybrid_shard"]), "strategies='hybrid_shard': it is one of"),
    (lambda: plan.calibrate(sizes=(1e6,)), "sizes=1000000.0: it is a whole number of bytes"),  # type: ignore[arg-type]
    (lambda: plan.calibrate(operations="all_reduce"), "operations='all_reduce': one or more of"),
    (lambda: plan.calibrate(repeats=2.5), "repeats=2.5: it is a whole number"),  # type: ignore[arg-type]
    (lambda: plan.calibrate(budget_s="5s"), "budget_s='5s': it is seconds"),  # type: ignore[arg-type]
    (lambda: plan.calibrate(dtype=torch.int8), "dtype=torch.int8: a dtype of floating point"),
    (lambda: plan.calibrate(strategies=("zero",)), "strategies='zero': it is one of"),
    (lambda: plan.calibrate(cluster=3), "cluster=3: it is a cluster"),
]


def _sgd() -> torch.optim.Optimizer:
    return torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=1)


def _sent(**options: Any) -> Any:
    return plan.communication(SMALL, 2, **options)


@pytest.mark.parametrize(("call", "message"), MEMORY + LAYOUTS, ids=range(len(MEMORY + LAYOUTS)))
def test_a_mistake_is_told_in_a_sentence(call: Callable[..., Any], message: str) -> None:
    with pytest.raises(UsageError, match=message) as caught:
        call()
    text = str(caught.value)
    assert "\n" not in text
    assert text.endswith((".", "?"))
    assert len(text) < 400


def test_strategies_are_those_of_the_library() -> None:
    assert set(STRATEGIES) == {"ddp", *(strategy.value for strategy in ShardingStrategy)}


def test_models_written_for_a_card_are_planned_for_without_one() -> None:
    asked = plan.communication(OnCard, 2, inputs=lambda: torch.ones(2, 8, device="cuda"), strategy="ddp")
    assert asked.bytes() == 2 * (8 * 8 + 8) + 4 * 8  # gradients of bfloat16, and a buffer
    states = plan.memory(OnCard, 2, inputs=SPEC, method="closed_form", dtype="float32").worst.persistent
    assert states.parameters * 2 == 4 * (8 * 8 + 8)
    assert torch.nn.Linear(2, 2).to(torch.float64).weight.dtype is torch.float64


def test_other_forms_of_the_same_question() -> None:
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
