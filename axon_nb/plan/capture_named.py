"""A model that is given as it is, or by the name that it has on the ranks, to one that can be sent."""

from __future__ import annotations

import ast
from importlib import import_module
from typing import Any

from axon_nb.errors import NoClusterError
from axon_nb.plan.errors import PlanError
from axon_nb.plan.models import CapturedModel, is_module

__all__ = ["by_name", "sendable"]


def sendable(model: Any, cluster: Any = None) -> Any:
    """What stands for a model in another process.

    Args:
        model: In any form that a plan takes.
        cluster: Whose ranks know it, where it is a name; None: the one that this notebook's cells run on.

    Raises:
        PlanError: no rank has a model of that name.
        NoClusterError: there are no ranks to ask.
    """
    if is_module(model):
        return import_module("axon_nb.plan.capture_model").capture(model)
    return by_name(model, cluster)


def by_name(model: Any, cluster: Any = None) -> Any:
    """A model of the ranks, where a name is given; anything else as it is.

    Args:
        model: As in `sendable`.
        cluster: The same.

    Raises:
        PlanError: no rank has a model of that name.
        NoClusterError: there are no ranks to ask.
    """
    return _from_ranks(model, cluster) if isinstance(model, str) else model


def _from_ranks(name: str, cluster: Any) -> CapturedModel:
    if not _is_name(name):
        raise PlanError(f"model={name!r}: a variable of the ranks, such as 'model' or 'trainer.model'.")
    if cluster is None:
        try:
            cluster = import_module("axon_nb").current_cluster()
        except NoClusterError:
            raise NoClusterError(f"A plan for the ranks' variable {name!r}") from None
    if not hasattr(cluster, "run"):
        raise PlanError(f"cluster={cluster!r}: it is a cluster, such as axon_nb.current_cluster() gives.")
    module = "__import__('axon_nb.plan.capture_model', fromlist=['captured_or_why'])"
    answers = cluster.run(f"{module}.captured_or_why(lambda: {name}, {name!r})", quiet=True).values
    for answer in answers.values():
        if isinstance(answer, CapturedModel):
            return answer
    reasons = dict.fromkeys(str(answer) for answer in answers.values())
    raise PlanError(
        f"model={name!r}: on the ranks {'; '.join(reasons)}. Name a torch.nn.Module that a cell has made there, or "
        "give a function without arguments that makes the model."
    )


def _is_name(text: str) -> bool:
    """Whether it is a variable, with attributes and constant indices behind it: nothing that calls anything."""
    try:
        node = ast.parse(text, mode="eval").body
    except (SyntaxError, ValueError):
        return False
    while isinstance(node, ast.Attribute) or (isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant)):
        node = node.value
    return isinstance(node, ast.Name)
