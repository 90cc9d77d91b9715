"""Values of all kinds: digests are equal for equal values, and for no others; packed, they arrive unchanged."""

from __future__ import annotations

import functools
import threading
from typing import Any

import numpy as np
import pytest
import torch

from axon_nb.engine.inspection.variables import DigestWalk
from axon_nb.shell.value_pickle import pack, unpack
from tests.support.cases.value_kinds import KINDS, NOT_SENT, differs, nested

pytestmark = pytest.mark.filterwarnings("ignore")  # torch's, of kinds that are in beta or deprecated


def _walked(value: Any, name: str = "v") -> DigestWalk:
    walk = DigestWalk(name)
    walk.run(value)
    return walk


def _digest(value: Any) -> bytes:
    walk = _walked(value)
    assert not walk.skipped, walk.skipped
    return bytes(walk.digests[:16])


@pytest.mark.parametrize("kind", KINDS)
def test_digest_is_equal_for_equal_values_alone(kind: str) -> None:
    first, same, other = KINDS[kind](0), KINDS[kind](0), KINDS[kind](1)
    assert _digest(first) == _digest(same)
    assert _digest(first) != _digest(other)
    assert _digest({"a": [first]}) != _digest({"a": [other]})


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


@pytest.mark.parametrize("seed", range(20))
def test_nested_values_are_compared_and_packed_to_their_leaves(seed: int) -> None:
    _check_seed(seed)


@pytest.mark.slow
def test_200_nested_values_are_compared_and_packed_to_their_leaves() -> None:
    for seed in range(20, 220):
        _check_seed(seed)


def test_shared_and_copied_parts_are_equal() -> None:
    part = [torch.ones(3)]
    assert _digest([part, part]) == _digest([[torch.ones(3)], [torch.ones(3)]])
    first: dict[str, Any] = {"name": "a"}
    first["self"] = first
    second: dict[str, Any] = {"name": "a"}
    second["self"] = second
    assert _digest(first) == _digest(second)


def test_a_look_at_a_value_does_not_change_it() -> None:
    first, second = functools.partial(max, 1), functools.partial(max, 1)
    assert vars(first) == {}  # it has none until somebody asks
    assert _digest(first) == _digest(second)


def test_bytes_that_mean_nothing_are_not_compared() -> None:
    dtype = np.dtype([("n", "i1"), ("v", "f8")], align=True)
    first, second = (np.full(3 * dtype.itemsize, fill, np.uint8).view(dtype) for fill in (0, 255))
    for array in (first, second):
        array["n"], array["v"] = 1, 2.5
    assert _digest(first) == _digest(second)
    assert _digest(np.ma.masked_array([1.0, 2.0], [False, True])) == _digest(
        np.ma.masked_array([1.0, 3.0], [False, True])
    )


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


@pytest.mark.parametrize("kind", KINDS)
def test_comparison_of_these_tests_sees_each_kind(kind: str) -> None:
    first, same, other = KINDS[kind](0), KINDS[kind](0), KINDS[kind](1)
    assert differs(first, same) == ""
    assert differs(first, other) != ""


@pytest.mark.parametrize("kind", KINDS)
def test_packed_value_is_unchanged(kind: str) -> None:
    value = KINDS[kind](1)
    assert differs(value, unpack([bytearray(part) for part in pack(value)])) == ""


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
