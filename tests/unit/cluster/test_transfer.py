"""Splitting a value into parts for ranks, and joining them again."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from axon_nb.cluster.transfer import join_values, split_value
from axon_nb.errors import UsageError


@given(length=st.integers(0, 40), count=st.integers(1, 9))
def test_split_matches_numpy_and_torch(length: int, count: int) -> None:
    array = np.arange(length)
    parts = split_value(array, count)
    assert [part.tolist() for part in parts] == [part.tolist() for part in np.array_split(array, count)]
    tensors = split_value(torch.arange(length), count)
    assert [t.tolist() for t in tensors] == [t.tolist() for t in torch.arange(length).tensor_split(count)]
    assert split_value(list(range(length)), count) == [part.tolist() for part in parts]
    assert np.array_equal(join_values(parts), array)


@pytest.mark.parametrize("dim", [0, 1, -1])
def test_arrays_and_tensors_are_joined_along_a_dimension(dim: int) -> None:
    array = np.arange(35).reshape(5, 7)
    assert np.array_equal(join_values(split_value(array, 3, dim=dim), dim=dim), array)
    tensor = torch.from_numpy(array)
    assert torch.equal(join_values(split_value(tensor, 3, dim=dim), dim=dim), tensor)


def test_tables_keep_their_rows() -> None:
    frame = pd.DataFrame({"a": range(7), "b": list("abcdefg")})
    parts = split_value(frame, 3)
    assert [len(part) for part in parts] == [3, 2, 2]
    pd.testing.assert_frame_equal(join_values(parts), frame)


@pytest.mark.parametrize(
    ("parts", "joined"),
    [
        ([[1], [2, 3]], [1, 2, 3]),
        ([(1,), (2,)], (1, 2)),
        ([1.5, 2.5], [1.5, 2.5]),
        (["a", "b"], ["a", "b"]),
        ([1, "b"], [1, "b"]),
        ([{"a": 1}, {"a": 2}], [{"a": 1}, {"a": 2}]),
    ],
)
def test_other_values_are_joined_as_sequences_or_listed(parts: list[Any], joined: Any) -> None:
    assert join_values(parts) == joined


def test_scalars_become_a_vector() -> None:
    assert join_values([torch.tensor(1.0), torch.tensor(2.0)]).tolist() == [1.0, 2.0]
    assert join_values([np.array(1.0), np.array(2.0)]).tolist() == [1.0, 2.0]


def test_unsplittable_value_is_reported_with_fix() -> None:
    with pytest.raises(UsageError, match=r"settings has type dict: .* Use `%push` to send all of it"):
        split_value({}, 2, name="settings")
    with pytest.raises(UsageError, match=r"--dim 2: x has 2 dimensions"):
        split_value(np.ones((2, 2)), 2, dim=2, name="x")
    with pytest.raises(UsageError, match=r"--dim 1: .* has type list"):
        split_value([1, 2], 2, dim=1)
    with pytest.raises(UsageError, match=r"Cannot join parts of shapes .* along dimension 0"):
        join_values([np.ones((2, 2)), np.ones((2, 3))])


LARGE = 2**53 + 1


@pytest.mark.parametrize(
    ("whole", "fraction", "exact"),
    [
        (torch.tensor([16_777_217]), torch.tensor([0.5]), torch.tensor([3])),
        (np.array([LARGE]), np.array([0.5]), np.array([3])),
        (np.array([2**64 - 1], dtype="u8"), np.array([-1]), np.array([3], dtype="u8")),
        (pd.DataFrame({"a": [LARGE]}), pd.DataFrame({"a": [np.nan]}), pd.DataFrame({"a": [3]})),
        (pd.Series([LARGE]), pd.Series([0.5]), pd.Series([3])),
    ],
)
def test_whole_numbers_that_the_common_dtype_cannot_hold_are_not_joined(whole: Any, fraction: Any, exact: Any) -> None:
    listed = join_values([whole, fraction])
    assert listed[0] is whole
    assert listed[1] is fraction
    joined = join_values([exact, fraction])
    assert type(joined) is type(exact)
    assert len(joined) == 2
