"""Hugging Face models, made from their configs: no weights are read or downloaded."""

from __future__ import annotations

import json
import re
import threading
from importlib import import_module
from pathlib import Path
from typing import Any

from axon_nb.plan.errors import PlanError

_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
_CONFIG = "config.json"
_ANSWER_S = 2.0
"""Seconds in which the hub must answer; its client would retry for 25 without a network."""
_MAX_SEQ = 4096
"""Default number of tokens in a sample, as far as the model allows."""


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
