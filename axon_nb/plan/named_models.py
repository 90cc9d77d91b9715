"""Models for another process: given as a module, by name on the ranks or at Hugging Face, or as pipeline stages."""

from __future__ import annotations

import ast
import pickle
from collections import OrderedDict
from collections.abc import Sequence
from functools import partial
from importlib import import_module
from typing import Any

from axon_nb.errors import NoClusterError
from axon_nb.plan.errors import PlanError
from axon_nb.plan.hugging_face import hugging_face_model
from axon_nb.plan.models import CapturedModel, is_module
from axon_nb.records.protocol.contents import CaptureModel
from axon_nb.records.protocol.messages import Expression, cell_source


def sendable_model(model: Any, cluster: Any = None) -> Any:
    """Return what stands for a model in another process.

    Args:
        model: The model, in any form that a plan takes.
        cluster: The cluster on which it is a name; None: the one that this notebook's cells run on.

    Raises:
        PlanError: no rank has a model of that name.
        NoClusterError: no ranks run.
    """
    model = hugging_face_model(model)
    if is_module(model):
        return import_module("axon_nb.plan.skeleton").capture(model)
    return model_by_name(model, cluster)


def model_by_name(model: Any, cluster: Any = None) -> Any:
    """Return the ranks' model, or Hugging Face's, if a name is given; anything else unchanged.

    Args:
        model: The same as in `sendable_model`.
        cluster: The same.

    Raises:
        PlanError: no rank has a model of that name.
        NoClusterError: no ranks run.
    """
    model = hugging_face_model(model)
    return _from_ranks(model, cluster) if isinstance(model, str) else model


def _from_ranks(name: str, cluster: Any) -> CapturedModel:
    if not _is_name(name):
        raise PlanError(
            "model must be a variable on the ranks, such as 'model' or 'trainer.model', or a Hugging Face model, "
            f"such as 'meta-llama/Llama-3.1-8B'; got {name!r}."
        )
    if cluster is None:
        try:
            cluster = import_module("axon_nb").current_cluster()
        except NoClusterError as error:
            raise NoClusterError(f"A plan for the ranks' variable {name!r}", kept=error.kept) from None
    if not hasattr(cluster, "run"):
        raise PlanError(f"cluster must be a Cluster, such as axon_nb.current_cluster(); got {cluster!r}.")
    call = CaptureModel(look=Expression(f"lambda: {name}"), name=name)
    answers = cluster.run(cell_source(call), quiet=True).values
    for answer in answers.values():
        if isinstance(answer, CapturedModel):
            return answer
    reasons = dict.fromkeys(str(answer) for answer in answers.values())
    raise PlanError(
        f"model={name!r} cannot be used: on the ranks, {'; '.join(reason.rstrip('.') for reason in reasons)}. Name a "
        "torch.nn.Module on the ranks, or give a function without arguments that makes the model."
    )


def _is_name(text: str) -> bool:
    """Return whether it is a variable, possibly with attributes and constant indices; nothing in it is called."""
    try:
        node = ast.parse(text, mode="eval").body
    except (SyntaxError, ValueError):
        return False
    while isinstance(node, ast.Attribute) or (isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant)):
        node = node.value
    return isinstance(node, ast.Name)


def join_stages(stages: Sequence[bytes]) -> bytes:
    """Return a pickled function without arguments that makes the whole model, as in `CapturedModel`.

    Args:
        stages: The stages in order; each a pickled function without arguments that makes a Sequential of the stage's
            modules, under their names in the whole model.
    """
    return pickle.dumps(partial(_make_joined, tuple(stages)))


def _make_joined(stages: Sequence[bytes]) -> Any:
    children: OrderedDict[str, Any] = OrderedDict()
    for stage in stages:
        children.update(pickle.loads(stage)().named_children())
    return import_module("torch.nn").Sequential(children)
