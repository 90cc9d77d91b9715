"""A model of which each rank has some stages, put together from what makes each of them."""

from __future__ import annotations

import pickle
from collections import OrderedDict
from collections.abc import Sequence
from functools import partial
from importlib import import_module
from typing import Any

__all__ = ["join_stages"]


def join_stages(stages: Sequence[bytes]) -> bytes:
    """What makes the whole model, pickled: a function without arguments, as `CapturedModel` has it.

    Args:
        stages: In order; of each a function without arguments, pickled, that makes a Sequential of its modules under
            the names that they have in the whole.
    """
    return pickle.dumps(partial(_joined, tuple(stages)))


def _joined(stages: Sequence[bytes]) -> Any:
    children: OrderedDict[str, Any] = OrderedDict()
    for stage in stages:
        children.update(pickle.loads(stage)().named_children())
    return import_module("torch.nn").Sequential(children)
