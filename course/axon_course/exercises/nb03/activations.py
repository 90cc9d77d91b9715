"""Exercise 3.2: the bytes that a block keeps for backward."""

from __future__ import annotations

from typing import Any

import torch

from axon_course.definitions import Exercise, Mistake, Property
from axon_course.exercises.nb03.block import PlainBlock
from axon_course.memory import SavedBytes
from axon_course.trials import Trial
from axon_nb.records.units import format_bytes

Sizes = tuple[int, int, int, int]
"""Batch, context, hidden and heads."""
_TOLERANCE = 0.05
_SHORT: Sizes = (1, 8, 64, 1)
_WIDE: Sizes = (1, 8, 128, 1)
_BATCH: Sizes = (3, 8, 64, 1)
_LONG: Sizes = (1, 256, 32, 1)
_HEADS: Sizes = (2, 64, 32, 8)
_ALL = (_SHORT, _WIDE, _BATCH, _LONG, _HEADS)
_PER_TOKEN = 16
"""Numbers that a block keeps for each number of its input, besides attention's weights."""
_BYTES = 4


def _measured(sizes: Sizes) -> int:
    batch, context, hidden, heads = sizes
    block = PlainBlock(hidden, heads)
    with SavedBytes(block.parameters()) as saved:
        output = block(torch.ones(batch, context, hidden))
    kept = saved.bytes
    del output  # until here, it keeps alive what backward needs
    return kept


def _asked(trial: Trial, sizes: Sizes) -> Any:
    def on_rank(answer: Any) -> Any:
        return answer(*sizes)

    return trial.run(on_rank, ranks=1)[0]


def _holds(trial: Trial, sizes: Sizes) -> str | None:
    got, right = _asked(trial, sizes), _measured(sizes)
    if isinstance(got, int | float) and abs(got - right) <= _TOLERANCE * right:
        return None
    names = ("batch", "context", "hidden", "heads")
    case = ", ".join(f"{name} {size}" for name, size in zip(names, sizes, strict=True))
    said = format_bytes(int(got)) if isinstance(got, int | float) else repr(got)
    return f"{case}: got {said}; measured: {format_bytes(right)}"


def _random_sizes(trial: Trial) -> str | None:
    heads = trial.random.choice((1, 2, 4))
    sizes = (trial.random.randint(1, 4), trial.random.randint(8, 96), 16 * trial.random.randint(1, 4), heads)
    return _holds(trial, sizes)


def _numbers(sizes: Sizes, *, per_token: int = _PER_TOKEN, heads: int | None = None) -> int:
    batch, context, hidden, all_heads = sizes
    heads = all_heads if heads is None else heads
    return batch * context * (per_token * hidden + heads * context)


def _answers(trial: Trial, wrong: Any) -> bool:
    """Whether the answer is always within a percent of a wrong formula."""
    pairs = [(_asked(trial, sizes), wrong(sizes)) for sizes in _ALL]
    return all(abs(got - value) <= 0.01 * value for got, value in pairs)


ACTIVATIONS = Exercise(
    id="3.2",
    title="What a block keeps for backward",
    answer="block_bytes",
    properties=(
        Property("a short text", lambda trial: _holds(trial, _SHORT), mock_only=True),
        Property("a wider block", lambda trial: _holds(trial, _WIDE), mock_only=True),
        Property("a larger batch", lambda trial: _holds(trial, _BATCH), mock_only=True),
        Property("a long text", lambda trial: _holds(trial, _LONG), mock_only=True),
        Property("more heads", lambda trial: _holds(trial, _HEADS), mock_only=True),
        Property("any sizes", _random_sizes, mock_only=True),
    ),
    mistakes=(
        Mistake(
            "This counts numbers, not bytes: a float32 takes four.",
            lambda trial: _answers(trial, _numbers),
        ),
        Mistake(
            "Something grows with the square of the context, and is missing here. What is there one of for each pair "
            "of tokens?",
            lambda trial: _answers(trial, lambda sizes: _BYTES * _numbers(sizes, heads=0)),
        ),
        Mistake(
            "Each head has a table of weights for itself; this counts one for all of them.",
            lambda trial: _answers(trial, lambda sizes: _BYTES * _numbers(sizes, heads=1)),
        ),
        Mistake(
            "The wide part of the block is missing: between `up` and `down` a token is four times as wide.",
            lambda trial: _answers(trial, lambda sizes: _BYTES * _numbers(sizes, per_token=_PER_TOKEN - 6)),
        ),
        Mistake(
            "The wide tensor is kept twice: GELU needs what goes in, and `down` needs what comes out.",
            lambda trial: _answers(trial, lambda sizes: _BYTES * _numbers(sizes, per_token=_PER_TOKEN - 4)),
        ),
    ),
    hints=(
        (
            "Go through the block line by line. To compute gradients, a linear layer needs its input, a product of two "
            "tensors needs both, a norm and GELU need their input, and softmax its output. A sum needs nothing."
        ),
        (
            "Count in tensors of batch × context × hidden numbers, and count a tensor once even if two operations keep "
            "it. Inside the MLP, a tensor counts as four. The weights of attention are counted separately."
        ),
        (
            "x, norm1's output, query, key, value, the input of `out`, the input of norm2, norm2's output: eight. "
            "GELU's input and output: four each. Then batch × heads × context × context weights. Times 4 bytes."
        ),
    ),
)
