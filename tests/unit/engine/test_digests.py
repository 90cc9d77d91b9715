"""Digests are equal for equal values and for no others; and the function in which a number ceases to be finite."""

from __future__ import annotations

import functools
import json
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from axon_nb.engine.divergence import NumberLog, Replicas, checksum, total_norm
from axon_nb.engine.inspection.variables import DigestWalk
from axon_nb.engine.nonfinite import LastCalls
from axon_nb.records.protocol.inspection import NumbersReply
from axon_nb.records.protocol.wire import encode
from axon_nb.records.training.digests import Origin
from axon_nb.shell.value_pickle import pack, unpack
from tests.support.cases.value_kinds import KINDS, NOT_SENT, differs, nested

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int8, torch.bool, torch.complex64]


def _walked(value: Any, name: str = "v") -> DigestWalk:
    walk = DigestWalk(name)
    walk.run(value)
    return walk


def _digest(value: Any) -> bytes:
    walk = _walked(value)
    assert not walk.skipped, walk.skipped
    return bytes(walk.digests[:16])


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", KINDS)
def test_digest_is_equal_for_equal_values_alone(kind: str) -> None:
    first, same, other = KINDS[kind](0), KINDS[kind](0), KINDS[kind](1)
    assert _digest(first) == _digest(same)
    assert _digest(first) != _digest(other)
    assert _digest({"a": [first]}) != _digest({"a": [other]})


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", NOT_SENT)
def test_values_of_a_process_are_named(kind: str) -> None:
    walk = _walked(NOT_SENT[kind](1))
    assert [path for path, _ in walk.skipped.values()] == ['v["lock"]' if kind == "within" else "v"]


def _check_seed(seed: int) -> None:
    same, _ = nested(seed)
    walk = _walked(same)
    assert walk.digests == _walked(nested(seed)[0]).digests
    assert not walk.skipped
    assert differs(same, unpack([bytearray(part) for part in pack(same)])) == ""
    changed, leaf = nested(seed, 0)
    assert leaf
    assert _digest(changed) != walk.digests[:16], (seed, leaf)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("seed", range(20))
def test_nested_values_are_compared_and_packed_to_their_leaves(seed: int) -> None:
    _check_seed(seed)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.slow
def test_200_nested_values_are_compared_and_packed_to_their_leaves() -> None:
    for seed in range(20, 220):
        _check_seed(seed)


@pytest.mark.filterwarnings("ignore")
def test_shared_and_copied_parts_are_equal() -> None:
    part = [torch.ones(3)]
    assert _digest([part, part]) == _digest([[torch.ones(3)], [torch.ones(3)]])
    first: dict[str, Any] = {"name": "a"}
    first["self"] = first
    second: dict[str, Any] = {"name": "a"}
    second["self"] = second
    assert _digest(first) == _digest(second)


@pytest.mark.filterwarnings("ignore")
def test_a_look_at_a_value_does_not_change_it() -> None:
    first, second = functools.partial(max, 1), functools.partial(max, 1)
    assert vars(first) == {}  # it has none until somebody asks
    assert _digest(first) == _digest(second)


@pytest.mark.filterwarnings("ignore")
def test_bytes_that_mean_nothing_are_not_compared() -> None:
    dtype = np.dtype([("n", "i1"), ("v", "f8")], align=True)
    first, second = (np.full(3 * dtype.itemsize, fill, np.uint8).view(dtype) for fill in (0, 255))
    for array in (first, second):
        array["n"], array["v"] = 1, 2.5
    assert _digest(first) == _digest(second)
    assert _digest(np.ma.masked_array([1.0, 2.0], [False, True])) == _digest(
        np.ma.masked_array([1.0, 3.0], [False, True])
    )


@pytest.mark.filterwarnings("ignore")
def test_what_is_too_much_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    large = DigestWalk("v", max_bytes=1000)
    large.run([torch.zeros(1000)])
    assert large.skipped == {0: ("v", "more than 0.977 KiB")}
    late = DigestWalk("v", began=-1000.0)
    late.run([1])
    assert late.skipped == {0: ("v", "more than 30 s")}
    deep: list[Any] = []
    for _ in range(150):
        deep = [deep]
    assert [why for _, why in _walked(deep).skipped.values()] == ["nested more than 100 levels deep"]
    monkeypatch.setattr("axon_nb.engine.inspection.variables._MAX_NODES", 1000)
    assert _walked([[] for _ in range(1001)]).skipped == {0: ("v", "more than 1,000 values")}


@pytest.mark.filterwarnings("ignore")
def test_a_part_that_fails_does_not_hide_the_others() -> None:
    class Broken:
        def __reduce__(self) -> Any:
            raise ValueError("no state\nat all")

    first, second = ({"a": Broken(), "lock": threading.Lock(), "b": number} for number in (1, 2))
    assert list(_walked(first).skipped.values()) == [
        ('v["a"]', "a Broken: ValueError: no state"),
        ('v["lock"]', "a lock"),
    ]
    assert _walked(first).digests[:16] != _walked(second).digests[:16]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", KINDS)
def test_comparison_of_these_tests_sees_each_kind(kind: str) -> None:
    first, same, other = KINDS[kind](0), KINDS[kind](0), KINDS[kind](1)
    assert differs(first, same) == ""
    assert differs(first, other) != ""


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", KINDS)
def test_packed_value_is_unchanged(kind: str) -> None:
    value = KINDS[kind](1)
    assert differs(value, unpack([bytearray(part) for part in pack(value)])) == ""


@pytest.mark.filterwarnings("ignore")
def test_history_of_a_tensor_stays_behind() -> None:
    loss = (torch.ones(3, requires_grad=True) * 2).sum()
    jagged = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged, requires_grad=True) * 2
    found = unpack(
        [bytearray(part) for part in pack([loss, jagged, jagged.detach().to_padded_tensor(0.0).to_sparse()])]
    )
    assert [tensor.requires_grad for tensor in found] == [False] * 3
    assert found[0].item() == 6.0
    assert [part.tolist() for part in found[1].unbind()] == [[2.0] * 2, [2.0] * 3]


REGISTER = ["register_forward_hook", "register_forward_pre_hook", "register_full_backward_hook"]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("register", REGISTER)
def test_modules_with_another_hook_differ(register: str) -> None:
    made = [torch.nn.Sequential(torch.nn.Linear(1, 1)) for _ in range(4)]
    for module in made[1:]:
        module[0].load_state_dict(made[0][0].state_dict())
    seen: list[list[Any]] = [[], [1]]
    for module, content in zip(made[1:3], seen, strict=True):
        getattr(module[0], register)(lambda *args, into=content: into.append(args))
    getattr(made[3][0], register)(lambda *_: None)
    digests = [_digest(module) for module in made]
    assert digests[1] == digests[2], "what a hook has collected is not the module's"
    assert len({*digests}) == 3


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
