"""Exercise 6.2: attention, with some heads on each rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional

from axon_course.comparisons import first_difference
from axon_course.definitions import Exercise, Mistake, Property
from axon_course.trials import Trial
from axon_nb.comm.calls import calls
from axon_nb.parallel.models import Attention

_TOLERANCE = 1e-9
_BATCH, _POSITIONS = 2, 5
_UNCLEAR = "raised "
"""Begins what `_refusal_on_rank` returns if the error is not a ValueError."""


def _head_size(trial: Trial) -> int:
    return 2 * trial.ranks  # so that any number of heads has features that ranks divide


def _attention(trial: Trial, heads: int) -> tuple[Attention, torch.Tensor]:
    generator = trial.generator(f"attention {heads}")
    hidden = heads * _head_size(trial)
    whole = Attention(hidden, heads).double()
    with torch.no_grad():
        for weight in whole.parameters():
            weight.copy_(torch.rand(weight.shape, generator=generator, dtype=torch.float64) - 0.5)
    return whole, torch.rand(_BATCH, _POSITIONS, hidden, generator=generator, dtype=torch.float64)


def _on_rank(answer: Any, whole: Attention, x: torch.Tensor) -> tuple[Any, torch.Tensor | None, int, int]:
    """Return the output, the input's gradient, the calls of forward, and the numbers that the rank keeps."""
    split = answer(whole)
    x = x.clone().requires_grad_()
    with calls() as counted:
        output = split(x)
    if isinstance(output, torch.Tensor) and output.requires_grad:
        output.square().sum().backward()
        output = output.detach()
    return output, x.grad, counted.num_calls, sum(weight.numel() for weight in split.parameters())


def _refusal_on_rank(answer: Any, whole: Attention, x: torch.Tensor) -> str | None:
    try:
        answer(whole)(x)
    except NotImplementedError:
        raise
    except ValueError as error:
        return str(error) or "no message"
    except Exception as error:  # an answer may fail in any way
        return f"{_UNCLEAR}{type(error).__name__}"
    return None


def _outputs(trial: Trial, heads: int) -> tuple[list[Any], Attention, torch.Tensor]:
    whole, x = _attention(trial, heads)
    return [rank[0] for rank in trial.run(_on_rank, whole, x)], whole, x


def _equals(trial: Trial, heads: int, case: str) -> str | None:
    found, whole, x = _outputs(trial, heads)
    return first_difference(found, [whole(x).detach()] * trial.ranks, case, tolerance=_TOLERANCE)


def _one_head_each(trial: Trial) -> str | None:
    return _equals(trial, trial.ranks, "one head per rank")


def _two_heads_each(trial: Trial) -> str | None:
    return _equals(trial, 2 * trial.ranks, "two heads per rank")


def _input_gradient(trial: Trial) -> str | None:
    whole, x = _attention(trial, trial.ranks)
    found = [rank[1] for rank in trial.run(_on_rank, whole, x)]
    leaf = x.clone().requires_grad_()
    whole(leaf).square().sum().backward()
    expected = [torch.as_tensor(leaf.grad)] * trial.ranks
    return first_difference(found, expected, "gradient of x", tolerance=_TOLERANCE)


def _keeps_its_heads(trial: Trial) -> str | None:
    whole, x = _attention(trial, trial.ranks)
    matrices = 4 * whole.out.weight.numel()
    allowed = matrices // trial.ranks + 4 * whole.out.out_features
    for rank, (*_, kept) in enumerate(trial.run(_on_rank, whole, x)):
        if kept > allowed:
            return f"rank {rank} keeps {kept:,} numbers; a {trial.ranks}th of the matrices, and biases, are {allowed:,}"
    return None


def _one_sum(trial: Trial) -> str | None:
    for rank, (_, _, number, _) in enumerate(trial.run(_on_rank, *_attention(trial, trial.ranks))):
        if number != 1:
            return f"rank {rank} made {number} calls in forward; one sum at the end is enough"
    return None


def _refusals(trial: Trial) -> tuple[int, list[str | None]]:
    heads = trial.ranks + 1
    return heads, trial.run(_refusal_on_rank, *_attention(trial, heads))


def _refuses_cut_heads(trial: Trial) -> str | None:
    if trial.ranks < 2:
        return None
    heads, said = _refusals(trial)
    for rank, words in enumerate(said):
        if words is None:
            return f"{heads} heads on {trial.ranks} ranks: rank {rank} did not raise a ValueError"
        if words.startswith(_UNCLEAR):
            return f"{heads} heads on {trial.ranks} ranks: rank {rank} {words}; raise a ValueError that says why"
        if str(heads) not in words or str(trial.ranks) not in words:
            return f"{heads} heads on {trial.ranks} ranks: rank {rank} said {words!r}; name both numbers"
    return None


def _returns(trial: Trial, wrong: Callable[[Attention, torch.Tensor], torch.Tensor]) -> bool:
    found, whole, x = _outputs(trial, 2 * trial.ranks)
    return first_difference(found, [wrong(whole, x).detach()] * trial.ranks, "", tolerance=_TOLERANCE) is None


def _with_small_heads(whole: Attention, x: torch.Tensor) -> torch.Tensor:
    other = Attention(x.shape[-1], 1).double()
    other.load_state_dict(whole.state_dict())
    other.head_size = 2  # that of `_head_size`, divided by the number of ranks
    return torch.as_tensor(other(x))


def _not_causal(whole: Attention, x: torch.Tensor) -> torch.Tensor:
    parts = (whole.query(x), whole.key(x), whole.value(x))
    query, key, value = (part.unflatten(-1, (-1, whole.head_size)).transpose(1, 2) for part in parts)
    mixed = functional.scaled_dot_product_attention(query, key, value)
    return torch.as_tensor(whole.out(mixed.transpose(1, 2).flatten(-2)))


def _keeps_everything(trial: Trial) -> bool:
    whole, x = _attention(trial, trial.ranks)
    size = sum(weight.numel() for weight in whole.parameters())
    return all(rank[3] == size for rank in trial.run(_on_rank, whole, x))


HEADS = Exercise(
    id="6.2",
    title="Attention by heads",
    answer="SplitAttention",
    properties=(
        Property("one head per rank", _one_head_each),
        Property("two heads per rank", _two_heads_each),
        Property("gradient of the input", _input_gradient),
        Property("a rank keeps only its heads", _keeps_its_heads),
        Property("one call forward", _one_sum),
        Property("heads that ranks do not divide are refused", _refuses_cut_heads),
    ),
    mistakes=(
        Mistake(
            "The features can be divided, the heads cannot: some heads are cut in two, and the result is wrong without "
            "any error.",
            lambda trial: None in _refusals(trial)[1] and _two_heads_each(trial) is None,
        ),
        Mistake(
            "A rank has cut its few features into all heads, so the heads are too small.",
            lambda trial: _returns(trial, _with_small_heads),
        ),
        Mistake("Every rank keeps all heads.", _keeps_everything),
        Mistake(
            "A token looks at those after it: our attention is causal.", lambda trial: _returns(trial, _not_causal)
        ),
    ),
    hints=(
        "A head needs its rows of query, key and value, and nothing of the other heads. Who needs what of `out`?",
        (
            "Query, key and value are column layers, `out` is a row layer. How many heads has a rank, and how large is "
            "each? One of the two numbers does not depend on the number of ranks."
        ),
        (
            "`ColumnParallelLinear.from_linear(whole.query)`, and so on. In `forward`, do as the whole attention does: "
            "`part.unflatten(-1, (-1, self.head_size))` gives a rank as many heads as it has. Before that, raise a "
            "ValueError if `heads % dist.get_world_size()`."
        ),
    ),
)
