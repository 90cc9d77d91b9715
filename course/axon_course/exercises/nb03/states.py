"""Exercise 3.1: the bytes of the model states."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from axon_course.definitions import Exercise, Mistake, Property
from axon_course.trials import Trial

MakeOptimizer = Callable[[list[nn.Parameter]], torch.optim.Optimizer]


class _Tied(nn.Module):
    """Two layers that share one weight, under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, 3)
        self.output = nn.Linear(3, 5, bias=False)
        self.output.weight = self.embedding.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return one number per word, for each word."""
        return torch.as_tensor(self.output(self.embedding(x.long().clamp(0, 4))))


def _layer() -> nn.Module:
    return nn.Linear(3, 2)


def _network() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))


def _frozen() -> nn.Module:
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    model[0].requires_grad_(False)
    return model


def _half() -> nn.Module:
    return nn.Linear(3, 2, dtype=torch.bfloat16)


def _sgd(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def _momentum(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def _adam(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters)


def _made(make: Callable[[], nn.Module], optimizer: MakeOptimizer) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = make()
    return model, optimizer([weight for weight in model.parameters() if weight.requires_grad])


def _parts(make: Callable[[], nn.Module], optimizer: MakeOptimizer) -> tuple[int, int, int]:
    """Train one step, and return the bytes of weights, gradients and what the optimizer keeps."""
    model, made = _made(make, optimizer)
    weights = list(model.parameters())
    model(torch.ones(2, 3, dtype=weights[0].dtype)).sum().backward()
    made.step()
    gradients = [weight.grad for weight in weights if weight.grad is not None]
    kept = [item for state in made.state.values() for item in state.values() if isinstance(item, torch.Tensor)]
    counters = [item for item in kept if not item.dim()]
    sizes = [sum(tensor.nbytes for tensor in group) for group in (weights, gradients, kept, counters)]
    return sizes[0], sizes[1], sizes[2] - sizes[3]


def _asked(trial: Trial, make: Callable[[], nn.Module], optimizer: MakeOptimizer) -> Any:
    def on_rank(answer: Any) -> Any:
        return answer(*_made(make, optimizer))

    return trial.run(on_rank, ranks=1)[0]


def _holds(trial: Trial, make: Callable[[], nn.Module], optimizer: MakeOptimizer, case: str) -> str | None:
    got, right = _asked(trial, make, optimizer), sum(_parts(make, optimizer))
    return None if got == right else f"{case}: got {got!r}; after a step there are {right} bytes"


def _plain_sgd(trial: Trial) -> str | None:
    return _holds(trial, _layer, _sgd, "a layer of 8 numbers")


def _with_momentum(trial: Trial) -> str | None:
    return _holds(trial, _layer, _momentum, "a layer of 8 numbers, with momentum")


def _with_adam(trial: Trial) -> str | None:
    return _holds(trial, _layer, _adam, "a layer of 8 numbers, with Adam") or _holds(
        trial, _network, _adam, "a network of 26 numbers, with Adam"
    )


def _shared_weight(trial: Trial) -> str | None:
    return _holds(trial, _Tied, _adam, "one tensor of 15 numbers in two layers")


def _frozen_layer(trial: Trial) -> str | None:
    return _holds(trial, _frozen, _adam, "16 frozen numbers, 10 trained ones")


def _two_bytes(trial: Trial) -> str | None:
    return _holds(trial, _half, _adam, "a layer of 8 numbers in bfloat16")


def _untouched_on_rank(answer: Any) -> bool:
    model, optimizer = _made(_network, _adam)
    before = [weight.detach().clone() for weight in model.parameters()]
    answer(model, optimizer)
    same = all(torch.equal(old, new) for old, new in zip(before, model.parameters(), strict=True))
    return same and not optimizer.state and all(weight.grad is None for weight in model.parameters())


def _model_untouched(trial: Trial) -> str | None:
    if trial.run(_untouched_on_rank, ranks=1)[0]:
        return None
    return "the model or its optimizer has changed: predict without training"


def _returns(trial: Trial, optimizer: MakeOptimizer, wrong: Callable[[int, int, int], int]) -> bool:
    return bool(_asked(trial, _network, optimizer) == wrong(*_parts(_network, optimizer)))


def _gives_gradients_to_frozen(trial: Trial) -> bool:
    weights, *_ = _parts(_frozen, _adam)
    is_right_otherwise = not any(test(trial) for test in (_plain_sgd, _with_momentum, _with_adam))
    return is_right_otherwise and bool(_asked(trial, _frozen, _adam) == 4 * weights)


STATES = Exercise(
    id="3.1",
    title="The bytes of the model states",
    answer="states_bytes",
    properties=(
        Property("plain SGD", _plain_sgd, mock_only=True),
        Property("SGD with momentum", _with_momentum, mock_only=True),
        Property("Adam", _with_adam, mock_only=True),
        Property("a weight that two layers share", _shared_weight, mock_only=True),
        Property("a frozen layer", _frozen_layer, mock_only=True),
        Property("weights of 2 bytes", _two_bytes, mock_only=True),
        Property("nothing is trained", _model_untouched, mock_only=True),
    ),
    mistakes=(
        Mistake(
            "This counts numbers, not bytes.",
            lambda trial: _returns(trial, _sgd, lambda *parts: sum(parts) // 4),
        ),
        Mistake(
            "The gradients are missing: there is one for each weight, as large as the weight.",
            lambda trial: _returns(trial, _sgd, lambda weights, *_: weights),
        ),
        Mistake(
            "This counts moments for plain SGD, which keeps nothing from step to step.",
            lambda trial: _returns(trial, _sgd, lambda weights, *_: 4 * weights),
        ),
        Mistake(
            "Momentum is one more number per weight, and is missing here.",
            lambda trial: _returns(trial, _momentum, lambda weights, gradients, _: weights + gradients),
        ),
        Mistake(
            "This counts one number per weight for Adam; it keeps two.",
            lambda trial: _returns(
                trial, _adam, lambda weights, gradients, moments: weights + gradients + moments // 2
            ),
        ),
        Mistake(
            "Two layers share one tensor, and it was counted once for each name.",
            lambda trial: _asked(trial, _Tied, _adam) == 2 * sum(_parts(_Tied, _adam)),
        ),
        Mistake(
            "A frozen weight is never changed. Does it need a gradient, or moments?",
            _gives_gradients_to_frozen,
        ),
        Mistake(
            "Not every number has 4 bytes: ask each tensor.",
            lambda trial: _asked(trial, _half, _adam) == 2 * sum(_parts(_half, _adam)),
        ),
    ),
    hints=(
        "Three groups of numbers stay in memory from step to step. Which of them depend on the optimizer?",
        (
            "SGD keeps nothing, or one number per weight if `optimizer.defaults['momentum']` is not 0. Adam keeps two. "
            "`isinstance(optimizer, torch.optim.Adam)` says which it is."
        ),
        (
            "Go through `model.parameters()`, which lists a shared weight once. Each has `weight.nbytes`, and "
            "`weight.requires_grad` says whether it is trained: only then is there a gradient, and what the optimizer "
            "keeps."
        ),
    ),
)
