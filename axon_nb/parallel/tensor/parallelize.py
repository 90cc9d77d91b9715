"""Shard an ordinary model over ranks by a plan."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ParallelStyle, parallelize_module

from axon_nb.comm.collectives.movement import broadcast
from axon_nb.comm.errors import TensorError
from axon_nb.comm.group import GroupLike, ProcessGroup, resolve
from axon_nb.errors import UsageError
from axon_nb.parallel.tensor.report import ModuleReport, ParallelReport
from axon_nb.parallel.tensor.styles import STYLES, automatic_plan, check_divisible, create_style

Style = str | ParallelStyle


def parallelize(
    model: nn.Module,
    plan: Mapping[str, Style] | str = "auto",
    *,
    mesh: DeviceMesh | GroupLike | Any = None,
    sequence: bool = False,
    parallel_loss: bool = False,
) -> ParallelReport:
    """Shard the weights of a model over ranks, in place. Collective.

    Every rank first gets rank 0's parameters and buffers, so seeds do not matter; shards are slices of them. Parameters
    become DTensors, so create the optimizer afterwards. For data parallelism, apply `FSDP` or `fully_shard` next.

        parallelize(model, {"block*.attention.[qkv]*": "column", "block*.attention.out": "row",
                            "block*.up": "column", "block*.down": "row"}, mesh=mesh["tp"])

    Args:
        model: A model of plain tensors.
        plan: Maps patterns of module names, where ``*`` matches anything including dots, to styles: ``column`` (shards
            output features), ``row`` (shards input features, after a column layer), ``column+gather`` and
            ``split+row`` (replicated on the unsharded side), ``sequence`` (a norm), ``heads`` (a norm of
            single heads), ``share`` (a module whose column
            layers use one input: fewer sums), ``gather`` and ``split`` (of positions, at the input or output of any
            module), or one of torch's own. ``auto``: modules known to compute the same when sharded, see
            `axon_nb.parallel.tensor.styles`; the rest is not sharded.
        mesh: A mesh with one axis, or a group; None means all ranks.
        sequence: Shard (batch, positions, hidden) between blocks by position, and with it norms, residuals and what
            they store for backward. A plan of patterns says where, with the last three styles.
        parallel_loss: Whether, with ``auto``, the model returns this rank's part of the logits, for
            `parallel_cross_entropy`.

    Returns:
        How each module is sharded, or why not.

    Raises:
        TensorError: a pattern matches nothing, a module cannot be sharded like that or matches two patterns, features
            or heads are not divisible, or two modules share a weight.
        UsageError: a style or plan is unknown, or the model is already sharded.
    """
    group, axis = _axis(mesh, model)
    sharded = [name for name, parameter in model.named_parameters() if isinstance(parameter, DTensor)]
    if sharded:
        raise UsageError(f"{sharded[0]} is a DTensor; call parallelize first, on a model of plain tensors.")
    reasons: dict[str, str] = {}
    if isinstance(plan, str):
        if plan != "auto":
            raise UsageError(f"plan must be 'auto' or map patterns of module names to styles; got {plan!r}.")
        named, reasons = automatic_plan(model, num_ranks=group.size(), sequence=sequence, parallel_loss=parallel_loss)
        styles: dict[str, Style] = dict(named)
        default_reason = "not known to 'auto'"
    else:
        styles, default_reason = _match_patterns(model, plan), "matches no pattern"
    _check_styles(model, styles, group.size())
    sizes_before = {name: _parameter_sizes(module) for name, module in model.named_modules()}
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            broadcast(tensor, group=group)
    for name, style in styles.items():
        module = model.get_submodule(name)
        created = (
            style
            if isinstance(style, ParallelStyle)
            else create_style(style, module, sequence=sequence, inside=_has_prepared_input(name, styles))
        )
        parallelize_module(module, axis, created, src_data_rank=None)
    return _report(model, styles, sizes_before, reasons=reasons, default_reason=default_reason, num_ranks=group.size())


def _axis(mesh: Any, model: nn.Module) -> tuple[ProcessGroup, DeviceMesh]:
    group = resolve(mesh)
    if isinstance(mesh, DeviceMesh):
        return group, mesh
    device = next((parameter.device.type for parameter in model.parameters()), "cpu")
    return group, DeviceMesh.from_group(group.torch_group, device)


def _match_patterns(model: nn.Module, plan: Mapping[str, Style]) -> dict[str, Style]:
    choices: dict[str, tuple[str, Style]] = {}
    names = [name for name, _ in model.named_modules() if name]
    for pattern, style in plan.items():
        if not isinstance(style, ParallelStyle) and style not in STYLES:
            raise UsageError(f"{pattern!r}: style must be {', '.join(STYLES)} or one of torch's; got {style!r}.")
        matches = [name for name in names if fnmatchcase(name, pattern)]
        if not matches:
            raise TensorError(f"{pattern!r} matches no module; the modules are {_abbreviate(names)}.")
        for name in matches:
            if name in choices and choices[name][1] != style:
                raise TensorError(f"{name} matches {choices[name][0]!r} and {pattern!r}, which have different styles.")
            choices[name] = (pattern, style)
    return {name: style for name, (_, style) in choices.items()}


def _has_prepared_input(name: str, styles: Mapping[str, Style]) -> bool:
    above = name
    while above := above.rpartition(".")[0]:
        if styles.get(above) in ("gather", "share"):
            return True
    return False


def _check_styles(model: nn.Module, styles: Mapping[str, Style], num_ranks: int) -> None:
    owners = Counter(id(parameter) for _, parameter in model.named_parameters(remove_duplicate=False))
    for name, style in styles.items():
        module = model.get_submodule(name)
        if not isinstance(style, ParallelStyle):
            check_divisible(
                name, module, style, parent=model.get_submodule(name.rpartition(".")[0]), num_ranks=num_ranks
            )
        if any(owners[id(parameter)] > 1 for parameter in module.parameters(recurse=False)):
            raise TensorError(f"{name} shares a parameter with another module, so it cannot be sharded; leave it out.")


def _parameter_sizes(module: nn.Module) -> dict[str, tuple[tuple[int, ...], int]]:
    return {name: (tuple(p.shape), p.nbytes) for name, p in module.named_parameters(recurse=False)}


def _report(
    model: nn.Module,
    styles: Mapping[str, Style],
    sizes_before: Mapping[str, dict[str, tuple[tuple[int, ...], int]]],
    *,
    reasons: Mapping[str, str],
    default_reason: str,
    num_ranks: int,
) -> ParallelReport:
    rows = []
    for name, module in model.named_modules():
        if not sizes_before[name] and name not in styles:
            continue
        style = styles.get(name, "")
        local_bytes = 0
        shapes = []
        for key, parameter in module.named_parameters(recurse=False):
            local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
            local_bytes += local.nbytes
            shape, local_shape = _format_shape(sizes_before[name][key][0]), _format_shape(tuple(local.shape))
            shapes.append(f"{key} {shape}" if shape == local_shape else f"{key} {shape} -> {local_shape}")
        rows.append(
            ModuleReport(
                name,
                type(module).__name__,
                style if isinstance(style, str) else type(style).__name__,
                sum(size for _, size in sizes_before[name].values()),
                local_bytes,
                ", ".join(shapes),
                "" if name in styles else reasons.get(name, default_reason),
            )
        )
    return ParallelReport(num_ranks, tuple(rows))


def _format_shape(shape: tuple[int, ...]) -> str:
    return "x".join(map(str, shape)) or "1"


def _abbreviate(names: list[str]) -> str:
    more = f" and {len(names) - 8} more" if len(names) > 8 else ""
    return ", ".join(names[:8]) + more
