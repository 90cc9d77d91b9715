"""Replaces parameters of a model by others wherever this process holds them: in optimizers and in variables."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import torch

from axon_nb.engine.live_objects import objects_of, with_subclasses
from axon_nb.engine.session import current

__all__ = ["replace_parameters"]


def replace_parameters(replaced: Mapping[int, tuple[Any, Any]]) -> None:
    """Replace parameters in all optimizers and in the variables of cells.

    Args:
        replaced: The parameter before and now, by the `id` of the former.
    """

    def now(value: Any) -> Any:
        return replaced[id(value)][1] if id(value) in replaced else value

    for optimizer in objects_of(set(with_subclasses(torch.optim.Optimizer))):
        for group in getattr(optimizer, "param_groups", ()):
            group["params"][:] = [now(parameter) for parameter in group["params"]]
        state = defaultdict(dict, {now(parameter): value for parameter, value in optimizer.state.items()})
        optimizer.state = state
    namespace = current().kernel.shell.user_ns
    for name, value in list(namespace.items()):
        if id(value) in replaced:
            namespace[name] = now(value)
