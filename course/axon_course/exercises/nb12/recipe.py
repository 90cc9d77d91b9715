"""Exercise 12.4: the lowest loss for a given amount of text and of weights."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from axon_course.definitions import Exercise, Mistake, Property, Score
from axon_course.replays import Replay, replay_curve
from axon_course.trials import Trial
from axon_nb.parallel.models import GPT, GPTConfig, next_byte_loss, standard_library, windows

_NAMES = ("hidden", "blocks", "batch", "lr")
_CONTEXT = 32
_TOKENS = 16_384
_MOST_WEIGHTS = 100_000
_LIMIT = 2.7
_HELD_OUT = 256
_WARM_UP = 5


def _config(answer: Mapping[str, Any]) -> GPTConfig:
    return GPTConfig(context=_CONTEXT, hidden=answer["hidden"], heads=4, blocks=answer["blocks"])


def _well_formed(trial: Trial) -> str | None:
    answer = trial.answer
    if not isinstance(answer, Mapping) or set(answer) != set(_NAMES):
        return f"it must be a dictionary with the names {', '.join(_NAMES)}"
    for name in _NAMES[:-1]:
        if type(answer[name]) is not int or answer[name] < 1:
            return f"{name} is {answer[name]!r}; it must be a whole number, at least 1"
    if answer["hidden"] % 4:
        return f"hidden is {answer['hidden']}; it must be divisible by the 4 heads"
    if not isinstance(answer["lr"], int | float) or not 0 < answer["lr"] < 1:
        return f"lr is {answer['lr']!r}; it must be between 0 and 1"
    return None


def _small_enough(trial: Trial) -> str | None:
    with torch.device("meta"):
        count = sum(weight.numel() for weight in GPT(_config(trial.answer)).parameters())
    return None if count <= _MOST_WEIGHTS else f"the model has {count:,} weights; at most {_MOST_WEIGHTS:,} are allowed"


def _steps(answer: Mapping[str, Any]) -> int:
    return int(_TOKENS // (answer["batch"] * _CONTEXT))


def _enough_text(trial: Trial) -> str | None:
    answer = trial.answer
    if _steps(answer):
        return None
    return f"a batch of {answer['batch']} has {answer['batch'] * _CONTEXT:,} bytes; there are {_TOKENS:,} for all steps"


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    """Compute in one thread: with a model this small, several mostly wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


@functools.cache
@_one_thread()
def _trained(hidden: int, blocks: int, batch: int, lr: float) -> tuple[float, tuple[float, ...]]:
    """The loss on held-out text, and that of each step, in nats per byte; the same in each call."""
    train, test = standard_library(1 << 18).split([3 << 16, 1 << 16])
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = GPT(_config({"hidden": hidden, "blocks": blocks}))
    reader = torch.Generator().manual_seed(0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    steps, losses = _steps({"batch": batch}), []
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = lr * min(1.0, (step + 1) / _WARM_UP, (steps - step) / (steps / 2))
        x, target = windows(train, batch=batch, seq=_CONTEXT, generator=reader)
        optimizer.zero_grad()
        (loss := next_byte_loss(model(x), target)).backward()
        losses.append(loss.detach())
        optimizer.step()
    x, target = windows(test, batch=_HELD_OUT, seq=_CONTEXT, generator=reader.manual_seed(1))
    with torch.no_grad():
        return float(next_byte_loss(model(x), target)), tuple(map(float, losses))


def _loss(trial: Trial) -> float:
    answer = trial.answer
    return _trained(*(answer[name] for name in _NAMES))[0]


def _curve(trial: Trial) -> Replay:
    losses = _trained(*(trial.answer[name] for name in _NAMES))[1]
    return replay_curve(
        "The loss of your steps", losses, unit="nats per byte", start="step 1", end=f"step {len(losses)}"
    )


def _learns(trial: Trial) -> str | None:
    loss = _loss(trial)
    if loss < _LIMIT:
        return None
    steps = _steps(trial.answer)
    return f"after {steps} step{'s' * (steps > 1)} the loss is {loss:.3f} nats per byte; it must be below {_LIMIT:g}"


RECIPE = Exercise(
    id="12.4",
    title="The best use of 16,384 bytes",
    answer="recipe",
    properties=(
        Property("four names", _well_formed, mock_only=True),
        Property(f"at most {_MOST_WEIGHTS:,} weights", _small_enough, mock_only=True),
        Property("a batch that the text is enough for", _enough_text, mock_only=True),
        Property(f"a loss below {_LIMIT:g}", _learns, mock_only=True),
    ),
    mistakes=(
        Mistake(
            "Large batches leave few steps, and each step moves the weights only so far.",
            lambda trial: _steps(trial.answer) < 16,
        ),
        Mistake(
            "The steps are so long that they jump over what they look for: the loss goes up and down.",
            lambda trial: _learns(trial) is not None and trial.answer["lr"] >= 0.05,
        ),
        Mistake(
            "The steps are so short that the text ends before the model has got anywhere.",
            lambda trial: _learns(trial) is not None and trial.answer["lr"] <= 1e-3,
        ),
    ),
    hints=(
        "Keep the model small at first, and change only the learning rate: try 0.001, 0.003, 0.01, 0.03.",
        "Then halve the batch: twice as many steps. Where does it stop to help?",
        "Few, wide blocks learn faster here than many narrow ones, with a batch of 4 to 8 and a rate near 0.01.",
    ),
    score=Score("nats per byte", 2.36, _loss, _curve),
)
