"""The parts of a model that is not a Sequential, and stages of them."""

from __future__ import annotations

import copy
from collections.abc import Container, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from axon_nb.errors import UsageError
from axon_nb.parallel.data.blocks import equal_row, num_parameters


def owner(path: str, names: Container[str]) -> str:
    """Return the innermost of some modules that holds the module at a path; empty: none of them does."""
    while path and path not in names:
        path = path.rpartition(".")[0]
    return path


def equal_blocks(model: nn.Module) -> frozenset[str]:
    """Return the names of a model's equal blocks."""
    kinds = {type(block) for block in equal_row(model) or []}
    return frozenset(name for name, module in model.named_modules() if type(module) in kinds)


def pipeline_parts(model: nn.Module) -> tuple[str, ...]:
    """Return the modules that run one after the other in a model that is not a Sequential; empty if they are unknown.

    They are those of the model's own plan (`pp_plan` of transformers), else its equal blocks and what stands before and
    after the blocks. A list of blocks counts as its blocks.

    Args:
        model: The model.
    """
    if isinstance(model, nn.Sequential):
        return ()
    planned = getattr(model, "_pp_plan", None) or ()
    listed = [name for name, _ in model.named_modules() if name in planned]
    parts = tuple(inner for name in listed for inner in _expanded(model, name))
    if parts and all(owner(name, parts) for name, _ in model.named_parameters()):
        return parts  # a plan may list the head alone, if the model inside has none
    row = {name.rpartition(".")[0] for name in equal_blocks(model)}
    return tuple(_around(model, "", row)) if len(row) == 1 else ()


def _around(model: nn.Module, path: str, rows: set[str]) -> Iterator[str]:
    """Yield the children with parameters, and in place of those that hold the blocks, what is inside them."""
    for name, child in model.get_submodule(path).named_children():
        inner = f"{path}.{name}" if path else name
        if any(row == inner or row.startswith(f"{inner}.") for row in rows):
            yield from _expanded(model, inner) if inner in rows else _around(model, inner, rows)
        elif any(True for _ in child.parameters()):
            yield inner


def _expanded(model: nn.Module, name: str) -> list[str]:
    module = model.get_submodule(name)
    return [f"{name}.{inner}" for inner, _ in module.named_children()] if isinstance(module, nn.ModuleList) else [name]


def part_costs(model: nn.Module, parts: Sequence[str]) -> dict[str, float]:
    """Return the parameters of each part.

    Args:
        model: The model.
        parts: Its `pipeline_parts`.

    Raises:
        UsageError: two parts share a parameter.
    """
    found = {name: float(num_parameters([model.get_submodule(name)])) for name in parts}
    holders: dict[int, str] = {}
    for name in parts:
        for parameter in model.get_submodule(name).parameters():
            if (first := holders.setdefault(id(parameter), name)) != name:
                raise UsageError(
                    f"{first} and {name} share a parameter, which pipeline stages cannot: untie them, such as by "
                    "tie_word_embeddings=False in the config."
                )
    return found


class _Logits(NamedTuple):
    logits: torch.Tensor


class NamedStage(nn.Module):
    """A stage of a language model of transformers: some of its parts; its forward passes over the others.

    Args:
        model: The whole model; its modules are shared.
        names: Of the parts in this stage, some of its `pipeline_parts`.

    Raises:
        UsageError: the model has other parts before its blocks than an embedding of tokens.
    """

    def __init__(self, model: Any, names: Sequence[str]) -> None:
        super().__init__()
        parts, blocks = pipeline_parts(model), equal_blocks(model)
        embedding = getattr(model, "get_input_embeddings", lambda: None)()
        before = next((number for number, name in enumerate(parts) if name in blocks), 0)
        if before != 1 or model.get_submodule(parts[0]) is not embedding:
            raise UsageError(
                f"The stages of {type(model).__name__} are unknown, because {', '.join(parts[:before]) or 'nothing'} "
                "stands before its blocks instead of an embedding of tokens: plan it without pp."
            )
        self.parts = {name: model.get_submodule(name) for name in names}
        """By name in the whole model."""
        self.is_first, self.is_last = parts[0] in names, parts[-1] in names
        self._body = parts[0].rpartition(".")[0]
        self.inner = _copied(model, "", self.parts, parts)

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        """Return hidden states, in the last stage logits.

        Args:
            value: Tokens in the first stage, else hidden states.
        """
        model: Any = self.inner if self.is_last else self.inner.get_submodule(self._body)
        output = model(value) if self.is_first else model(inputs_embeds=value)
        found: torch.Tensor = output.logits if self.is_last else output.last_hidden_state
        return found

    @staticmethod
    def as_output(logits: torch.Tensor) -> Any:
        """Return the last stage's output as the whole model's, for its loss."""
        return _Logits(logits)


def _copied(module: nn.Module, path: str, own: Container[str], parts: Sequence[str]) -> Any:
    """Copy the modules around the parts; modules of other stages are passed over."""
    if path in parts:
        return module if path in own else _PassedOver(module)
    if path and not any(name.startswith(f"{path}.") for name in parts):
        return module
    made = copy.copy(module)
    children = module.named_children()
    made._modules = {name: _copied(child, f"{path}.{name}".lstrip("."), own, parts) for name, child in children}
    return made


class _PassedOver(nn.Module):
    """In place of a module of another stage: has its settings, and returns what it gets."""

    def __init__(self, original: nn.Module) -> None:
        super().__init__()
        kinds = (str, int, float, type(None))
        vars(self).update({name: value for name, value in vars(original).items() if isinstance(value, kinds)})

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the first argument."""
        return next(iter((*args, *kwargs.values())))
