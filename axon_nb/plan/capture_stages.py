"""Joins the pipeline stages of several ranks into one model."""

from __future__ import annotations

import pickle
from collections import OrderedDict
from collections.abc import Sequence
from functools import partial
from importlib import import_module
from typing import Any

__all__ = ["join_stages"]


def join_stages(stages: Sequence[bytes]) -> bytes:
    """Return a pickled function without arguments that makes the whole model, as `CapturedModel` has it.

    Args:
        stages: In order; each a pickled function without arguments that makes a Sequential of the stage's modules,
            under their names in the whole model.
    """
    return pickle.dumps(partial(_make_joined, tuple(stages)))


def _make_joined(stages: Sequence[bytes]) -> Any:
    children: OrderedDict[str, Any] = OrderedDict()
    for stage in stages:
        children.update(pickle.loads(stage)().named_children())
    return import_module("torch.nn").Sequential(children)
