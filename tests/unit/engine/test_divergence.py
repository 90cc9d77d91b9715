"""Checksums that any bit changes, and the search for the function in which a number ceases to be finite."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from axon_nb.engine.divergence import NumberLog, Replicas, checksum, total_norm
from axon_nb.engine.nonfinite import LastCalls
from axon_nb.records.protocol.inspection import NumbersReply
from axon_nb.records.protocol.wire import encode
from axon_nb.records.training.digests import Origin

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int8, torch.bool, torch.complex64]


@given(st.sampled_from(DTYPES), st.integers(1, 40), st.integers(0, 7), st.data())
def test_any_flipped_bit_changes_the_checksum(dtype: torch.dtype, size: int, start: int, data: Any) -> None:
    whole = torch.zeros((start + size) * dtype.itemsize, dtype=torch.uint8)
    tensor = whole.view(dtype)[start:]
    before = checksum(tensor)
    byte = data.draw(st.integers(start * dtype.itemsize, len(whole) - 1))
    whole[byte] = 1 << data.draw(st.integers(0, 0 if dtype is torch.bool else 7))
    assert checksum(tensor) != before
    assert checksum(tensor) == checksum(tensor.clone()), "wherever it lies in its storage"


def test_checksum_counts_numbers_rather_than_memory() -> None:
    tensor = torch.arange(12.0).view(3, 4)
    assert checksum(tensor.t().contiguous().t()) == checksum(tensor)
    assert checksum(torch.empty(0)) == 0
    assert checksum(torch.tensor(1.0)).dtype is torch.int64


def test_norm_of_all_tensors_is_not_finite_if_one_number_is_not() -> None:
    right = [torch.full((4,), 3.0), torch.full((4,), 4.0, dtype=torch.bfloat16), torch.eye(4).to_sparse()]
    assert float(total_norm(right)) == pytest.approx((36 + 64 + 4) ** 0.5)
    for wrong in (float("nan"), float("inf")):
        assert not torch.isfinite(total_norm([*right, torch.tensor([wrong])]))


def replicas_on(*ranks: int) -> Replicas:
    replicas = Replicas([torch.nn.Parameter(torch.ones(2))], [])
    replicas.compared, replicas.sets = [0], {ranks: [0]}
    return replicas


def test_reply_of_a_rank_does_not_grow_with_its_group() -> None:
    sizes = []
    for ranks in (range(2), range(1024), range(7, 1024, 8)):
        log = NumberLog("run")
        log.add(0, 0, ("line 2", ""), replicas=replicas_on(*ranks), weights=[1], gradients=[7])
        sizes.append(len(json.dumps(encode(NumbersReply(*log.since(0)[:2], 1, 0)))))
    assert max(sizes) < sizes[0] + 20


def test_log_drops_the_oldest_steps_and_says_how_many() -> None:
    replicas = replicas_on(0, 1)
    log = NumberLog("run")
    for step in range(5000):
        log.add(0, step, ("line 2", ""), replicas=replicas, weights=[step], gradients=[7])
    rows, sets, lost = log.since(100)
    assert (len(rows), lost, sets) == (4096, 804, {0: [((0, 2, 1),)]})
    assert log.since(log.end) == ([], {}, 0)
    assert log.details(0, 100) is None
    details = log.details(0, 4999)
    assert details is not None
    assert (details.names, details.weights, details.gradients) == (["parameter 0"], [4999], [7])
    assert len({row[2] for row in rows}) == 4096
    assert len({row[3] for row in rows}) == 1


class Layer(nn.Module):
    """A module that computes some function."""

    def __init__(self, function: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(x)


def origin(function: Callable[..., torch.Tensor], **options: Any) -> Origin | None:
    """Call a model with a function in its middle, and look for the origin."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), Layer(function), nn.Dropout(0.5), nn.Linear(4, 4))
    calls = LastCalls()
    calls.watch([model])
    x = options.get("x", torch.randn(8, 4))
    model(x)
    state, buffers = torch.get_rng_state(), [buffer.clone() for buffer in model.buffers()]
    with torch.no_grad():
        found = calls.find()
    calls.end()
    assert torch.equal(torch.get_rng_state(), state)
    torch.testing.assert_close(list(model.buffers()), buffers, rtol=0, atol=0, equal_nan=True)
    assert all(parameter.grad is None for parameter in model.parameters())
    return found


def masked_softmax(x: torch.Tensor) -> torch.Tensor:
    mask = torch.zeros(4, dtype=torch.bool)
    mask[0] = True
    return torch.softmax(x.masked_fill(mask, float("-inf")), -1)


@pytest.mark.parametrize(
    ("function", "stage", "operation"),
    [
        (lambda x: torch.log(x.clamp(min=0)), "forward", "log"),
        (lambda x: x / (x - x), "forward", "div"),
        (lambda x: torch.softmax(torch.full_like(x, float("-inf")), -1) + x, "forward", "softmax"),
        (lambda x: torch.exp(x * 1e9), "forward", "exp"),
        (lambda x: torch.sqrt(x.relu()), "backward", "sqrt"),
    ],
)
def test_function_that_makes_a_number_not_finite_is_named(
    function: Callable[..., torch.Tensor], stage: str, operation: str
) -> None:
    found = origin(function)
    assert found is not None
    assert (found.stage, found.name, found.module, found.operation) == (stage, "2", "Layer", operation)


def test_infinity_that_a_softmax_removes_is_not_named() -> None:
    assert origin(masked_softmax) is None
    found = origin(lambda x: torch.log(masked_softmax(x)))
    assert found is not None
    assert found.operation == "log"


def test_input_that_is_not_finite_is_named_before_the_model() -> None:
    assert origin(torch.tanh, x=torch.full((8, 4), float("nan"))) == Origin("input", "")
