"""The forms in which users give a model and its inputs to a planner, and how a model gets to another process.

A model is a module or what makes one, a name on the ranks or at Hugging Face (made from its config: no weights are read
or downloaded), or pipeline stages.
"""

from __future__ import annotations

import ast
import json
import pickle
import re
import threading
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, is_dataclass
from functools import partial
from importlib import import_module
from numbers import Integral
from pathlib import Path
from typing import Any

from axon_nb.errors import NoClusterError
from axon_nb.plan.errors import PlanError
from axon_nb.records.protocol.inspection import CaptureModel
from axon_nb.records.protocol.wire import Expression, cell_source

_DTYPES = ("float32", "bfloat16", "float16", "float64")
_FACTORY = "a function without arguments that makes the model, such as `lambda: GPT(GPTConfig(blocks=24))`"
_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
_CONFIG = "config.json"
_ANSWER_S = 2.0
"""Seconds in which the hub must answer; its client would retry for 25 without a network."""
_MAX_SEQ = 4096
"""Default number of tokens in a sample, as far as the model allows."""


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """A tensor's shape and dtype: ``TensorSpec(("batch", "seq"), "int64")``."""

    shape: tuple[int | str, ...]
    """Sizes; ``"batch"`` and ``"seq"`` stand for the plan's arguments of these names."""
    dtype: str = "float32"
    """Its name in torch; ``torch.int64`` works too."""

    def __post_init__(self) -> None:
        shape: Any = self.shape
        sizes: list[Any] = list(shape) if isinstance(shape, Iterable) and not isinstance(shape, str) else [None]
        if not all(isinstance(size, str) or (isinstance(size, Integral) and int(size) >= 0) for size in sizes):
            raise PlanError(
                "A TensorSpec's shape must be a tuple of sizes and names, such as "
                f"TensorSpec(('batch', 1024), 'int64'); got {shape!r}."
            )
        named = tuple(size if isinstance(size, str) else int(size) for size in sizes)
        object.__setattr__(self, "shape", named)
        object.__setattr__(self, "dtype", str(self.dtype).removeprefix("torch."))

    def sizes(self, named: Mapping[str, int | None]) -> tuple[int, ...]:
        """Return the shape with its names filled in.

        Raises:
            PlanError: a name is unknown, or its size is missing.
        """
        values = []
        for size in self.shape:
            if isinstance(size, str) and size not in named:
                raise PlanError(
                    f"A size in {self} must be a number or one of {', '.join(map(repr, named))}; got {size!r}."
                )
            value = named[size] if isinstance(size, str) else size
            if value is None:
                raise PlanError(f"{self} needs a size for {size!r}: give {size}=….")
            values.append(int(value))
        return tuple(values)


@dataclass(frozen=True, slots=True)
class CapturedModel:
    """A model of the ranks as it was before wrapping; plans can use it without the ranks."""

    name: str
    """Its name on the ranks."""
    factory: bytes
    """A function without arguments that makes an equal model, pickled by cloudpickle."""


def check_model(model: Any) -> None:
    """Check that a model is given in a supported form.

    Raises:
        PlanError: it is not.
    """
    if isinstance(model, CapturedModel) or (is_dataclass(model) and not isinstance(model, type)):
        return
    if isinstance(model, str):
        raise PlanError(f"model={model!r} is a name, which is not supported here: give {_FACTORY}.")
    if is_module(model):
        raise PlanError(
            f"model is an instance of {type(model).__name__}, which would be copied with its data: give {_FACTORY}."
        )
    if not callable(model):
        raise PlanError(f"model must be {_FACTORY}, or a GPTConfig(…); got {model!r}.")


def is_module(model: Any) -> bool:
    """Return whether it is a `torch.nn.Module`, without importing torch."""
    return any(kind.__module__.startswith("torch.nn.") and kind.__name__ == "Module" for kind in type(model).__mro__)


def dtype_name(dtype: Any, name: str) -> str:
    """Return a dtype's name without importing torch: ``torch.bfloat16`` and ``"bfloat16"`` are the same.

    Raises:
        PlanError: it is not a floating-point dtype for training.
    """
    text = str(dtype).removeprefix("torch.")
    if text not in _DTYPES:
        raise PlanError(f"{name} must be one of {', '.join(_DTYPES)}; got {dtype!r}.")
    return text


def hugging_face_model(model: Any) -> Any:
    """Return a `HuggingFaceModel` for a config, a config file, its folder or a name on the hub; else what was given.

    A name is ``owner/model``; a name without a slash is a variable on the ranks.
    """
    if any(kind.__name__.lower() == "pretrainedconfig" for kind in type(model).__mro__):
        return HuggingFaceModel(model)
    if isinstance(model, Path) or (isinstance(model, str) and (_NAME.fullmatch(model) or model.endswith(".json"))):
        return HuggingFaceModel(str(model))
    return model


class HuggingFaceModel:
    """Makes a causal language model of transformers from its config.

    Args:
        config: The config, a path, or a name on the hub.
    """

    def __init__(self, config: Any) -> None:
        self._given = config
        self.__name__ = config if isinstance(config, str) else type(config).__name__

    def config(self) -> Any:
        """Return the config, with the cache of generated tokens switched off.

        Raises:
            PlanError: transformers is not installed, there is no such config, or the hub cannot be reached.
        """
        if isinstance(self._given, str) and not Path(self._given).exists() and _NAME.fullmatch(self._given):
            _check_reachable(self._given)
        try:
            transformers: Any = import_module("transformers")
        except ImportError as error:
            raise PlanError(
                f"A Hugging Face model needs transformers ({error}): install it, or give a function that makes the "
                "model."
            ) from error
        made = self._given
        if isinstance(made, str):
            path = Path(made)
            path = path / _CONFIG if path.is_dir() else path
            try:
                if path.is_file():
                    values = json.loads(path.read_text(encoding="utf-8"))
                    made = transformers.AutoConfig.for_model(values.pop("model_type"), **values)
                else:
                    made = transformers.AutoConfig.from_pretrained(made)
            except Exception as error:
                first = (str(error).splitlines() or [""])[0]
                raise PlanError(
                    f"The config of {self._given!r} cannot be read ({type(error).__name__}: {first}): give the path of "
                    "its config.json, or an AutoConfig."
                ) from error
        made.use_cache = False
        return made

    def seq(self, requested: int | None) -> int:
        """Return the tokens in a sample.

        Args:
            requested: The requested number; None: 4096, or as many as the model allows.

        Raises:
            PlanError: the model allows fewer.
        """
        most = getattr(self.config(), "max_position_embeddings", None) or _MAX_SEQ
        if requested is not None and requested > most:
            raise PlanError(f"seq must be at most the model's context, {most} tokens; got {requested}.")
        return min(_MAX_SEQ, most) if requested is None else requested

    def __call__(self) -> Any:
        """Make the model."""
        return import_module("transformers").AutoModelForCausalLM.from_config(self.config())


def _check_reachable(name: str) -> None:
    """Check that the config of a model on the hub is in the cache, or that the hub answers."""
    try:
        hub: Any = import_module("huggingface_hub")
    except ImportError:
        return  # transformers is not installed either, which is said next
    if isinstance(hub.try_to_load_from_cache(name, _CONFIG), str):
        return
    failures: list[str] = ["no answer"]

    def ask() -> None:
        try:
            hub.get_session().head(hub.constants.ENDPOINT, timeout=_ANSWER_S)
            failures.clear()
        except Exception as error:
            failures[:] = [f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"]

    # A thread, because name resolution ignores the timeout.
    asking = threading.Thread(target=ask, daemon=True)
    asking.start()
    asking.join(_ANSWER_S)
    if failures:
        raise PlanError(
            f"The config of {name!r} is not in the cache, and the hub cannot be reached ({failures[0]}): check the "
            "network, or give the path of its config.json, or an AutoConfig."
        )


def next_token_loss(output: Any, target: Any) -> Any:
    """Return the mean loss of predicting each next token.

    Args:
        output: The output, with ``logits`` of shape (batch, seq, vocab).
        target: Tokens, shape (batch, seq).
    """
    cross_entropy = import_module("torch.nn.functional").cross_entropy
    return cross_entropy(output.logits[:, :-1].float().flatten(0, 1), target[:, 1:].flatten())


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
