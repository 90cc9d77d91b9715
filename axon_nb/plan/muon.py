"""The optimizer Muon in plans: `axon_nb.parallel.Muon` for matrices, and AdamW for the rest.

The rest is vectors, embeddings, and output heads, which have an embedding's shape.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from typing import Any

from torch import nn
from torch.optim import AdamW, Optimizer

from axon_nb.parallel.muon import Muon

NOT_ZERO_1 = "strategy='optimizer_state' does not work with Muon here: use shard_grad_op, full_shard or ddp."
NOTE = "Muon updates matrices; AdamW updates vectors, embeddings, and matrices of an embedding's shape (heads)"


class MuonAndAdamW(Optimizer):
    """Two optimizers as one.

    Args:
        params: `groups`: what Muon updates, and the rest.
        foreach: As in AdamW.
        options: Of Muon.
    """

    def __init__(self, params: Any, *, foreach: bool | None = None, **options: Any) -> None:
        matrices, rest = (group["params"] for group in params)
        super().__init__(params, {})
        self._both: list[Optimizer] = [Muon(matrices, **options)] if matrices else []
        self._both += [AdamW(rest, foreach=foreach)] if rest else []
        for one in self._both:
            one.state = self.state

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Take a step of both."""
        for one in self._both:
            one.step()


def is_muon(make: Callable[..., Optimizer] | None) -> bool:
    """Whether this makes Muon for matrices, and AdamW for the rest."""
    return make is not None and inspect.unwrap(make) is MuonAndAdamW


def matrix_names(model: nn.Module) -> frozenset[str]:
    """Return the names of the parameters of a whole model that Muon updates: matrices, and stacks of experts."""
    modules = dict(model.named_modules())
    embeddings = {tuple(module.weight.shape) for module in modules.values() if isinstance(module, nn.Embedding)}

    def is_matrix(name: str, parameter: nn.Parameter) -> bool:
        experts = getattr(modules[name.rpartition(".")[0]], "num_experts", None)
        is_stack = parameter.ndim == 3 and len(parameter) == experts
        return (parameter.ndim == 2 or is_stack) and tuple(parameter.shape) not in embeddings

    return frozenset(name for name, parameter in model.named_parameters() if is_matrix(name, parameter))


def groups(model: nn.Module, matrices: Iterable[str]) -> list[dict[str, Any]]:
    """Return a model's parameters as `MuonAndAdamW` takes them, given the names of its matrices."""
    both: dict[bool, list[nn.Parameter]] = {True: [], False: []}
    for name, parameter in model.named_parameters():
        both[name in matrices].append(parameter)
    return [{"params": both[True]}, {"params": both[False]}]
