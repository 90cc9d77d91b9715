"""Get and set the tensors of a model and its optimizer by parameter name, which is valid for any number of ranks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from axon_nb.parallel.checkpoint.errors import CheckpointMismatchError
from axon_nb.parallel.checkpoint.tensors import Shards

Optimizers = Optimizer | Iterable[Optimizer] | None
"""One optimizer, or several that train different parameters."""

_PREFIX = "optimizer"


def model_state(model: nn.Module, shards: Shards) -> dict[str, Any]:
    """Return parameters and buffers, sharing the model's memory; shards are DTensors.

    Args:
        model: The model without wrappers.
        shards: Its parameters.
    """
    return {name: shards.as_dtensor(name, value) for name, value in get_model_state_dict(model).items()}


def set_model_state(model: nn.Module, shards: Shards, state: dict[str, Any]) -> None:
    """Load a state as returned by `model_state`, or a part of it, into the model."""
    local = {
        name: value.to_local() if name in shards.sharded_names and isinstance(value, DTensor) else value
        for name, value in state.items()
    }
    set_model_state_dict(model, local, options=StateDictOptions(strict=False))


class OptimizerStates:
    """Reads and sets the states of the optimizers of one model.

    Tensors have names such as ``optimizer.exp_avg.block0.up.weight`` and the layout of their parameter. Everything else
    (learning rates, states that are not tensors) is plain data. A ZeroRedundancyOptimizer has one part per rank.

    Args:
        optimizers: One optimizer, or several.
        shards: The model's parameters.
    """

    def __init__(self, optimizers: Optimizers, shards: Shards) -> None:
        several = [optimizers] if isinstance(optimizers, Optimizer) else list(optimizers or ())
        self._optimizers = several
        # The states of a ZeroRedundancyOptimizer are in its local optimizer of this rank's parameters.
        self._local_optimizers: list[Optimizer] = [getattr(optimizer, "optim", optimizer) for optimizer in several]
        self._shards = shards
        self._names = {id(parameter): name for name, parameter in shards.names()}

    def tensors(self) -> dict[str, Any]:
        """Return the states that are tensors, by name."""
        states = {}
        for optimizer, _, name, parameter in self._parameters():
            for key, value in optimizer.state.get(parameter, {}).items():
                if isinstance(value, torch.Tensor):
                    states[f"{_PREFIX}.{key}.{name}"] = self._shards.as_dtensor(name, value, parameter.shape)
        return states

    def plain(self) -> dict[str, Any]:
        """Return everything else: options by parameter name, and states that are not tensors."""
        options, states = {}, {}
        # A scheduler changes the outer one, which passes that on in its next step.
        self._copy_options(to_outer=False)
        for optimizer, group, name, parameter in self._parameters():
            options[name] = {key: value for key, value in group.items() if key != "params"}
            other = optimizer.state.get(parameter, {}).items()
            states[name] = {key: value for key, value in other if not isinstance(value, torch.Tensor)}
        return {"options": options, "states": {name: state for name, state in states.items() if state}}

    def expected(self, metadata: Metadata) -> dict[str, Any]:
        """Return tensors of the saved sizes to read into; those of a parameter's shape have its layout."""
        saved: dict[str, list[tuple[str, TensorStorageMetadata]]] = {}
        for full, entry in metadata.state_dict_metadata.items():
            prefix, _, rest = full.partition(".")
            key, _, name = rest.partition(".")
            if prefix == _PREFIX and isinstance(entry, TensorStorageMetadata):
                saved.setdefault(name, []).append((key, entry))
        blanks = {}
        for _, group, name, parameter in self._parameters():
            for key, entry in saved.get(name, []):
                dtype = entry.properties.dtype
                if entry.size == self._shards.full_shape(name) and len(entry.size):
                    blank = torch.zeros_like(parameter.detach(), dtype=dtype)
                    blanks[f"{_PREFIX}.{key}.{name}"] = self._shards.as_dtensor(name, blank)
                else:
                    device = parameter.device if group.get("capturable") or group.get("fused") else "cpu"
                    blanks[f"{_PREFIX}.{key}.{name}"] = torch.zeros(entry.size, dtype=dtype, device=device)
        return blanks

    def restore(self, tensors: dict[str, Any], plain: dict[str, Any]) -> None:
        """Set the states that were read.

        Raises:
            CheckpointMismatchError: the saved optimizer did not train one of the parameters.
        """
        missing = [name for _, _, name, _ in self._parameters() if name not in plain["options"]]
        if missing:
            raise CheckpointMismatchError(
                f"The saved optimizer does not have {_some(missing)}; create the optimizer from the same parameters."
            )
        by_name: dict[str, dict[str, Any]] = {}
        for full, value in tensors.items():
            _, key, name = full.split(".", 2)
            by_name.setdefault(name, {})[key] = value
        for optimizer, group, name, parameter in self._parameters():
            group.update(plain["options"][name])
            state = {key: self._local(name, value) for key, value in by_name.get(name, {}).items()}
            state |= plain["states"].get(name, {})
            optimizer.state.pop(parameter, None)
            if state:
                optimizer.state[parameter] = state
        self._copy_options(to_outer=True)

    def _local(self, name: str, value: Any) -> Any:
        return value.to_local() if name in self._shards.sharded_names and isinstance(value, DTensor) else value

    def _copy_options(self, *, to_outer: bool) -> None:
        """Copy options of a ZeroRedundancyOptimizer from its local optimizer, or to it."""
        for outer, local in zip(self._optimizers, self._local_optimizers, strict=True):
            if outer is not local:
                for groups in zip(outer.param_groups, local.param_groups, strict=True):
                    target, source = groups if to_outer else reversed(groups)
                    target.update({key: value for key, value in source.items() if key != "params"})

    def _parameters(self) -> Iterator[tuple[Optimizer, dict[str, Any], str, torch.nn.Parameter]]:
        for optimizer in self._local_optimizers:
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    name = self._names.get(id(parameter))
                    if name is None:
                        raise CheckpointMismatchError(
                            f"{type(optimizer).__name__} has a parameter of shape {tuple(parameter.shape)} that is not "
                            "in the model; create it after the model, and save it with that model."
                        )
                    yield optimizer, group, name, parameter


def _some(names: list[str]) -> str:
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return ", ".join(names[:5]) + more
