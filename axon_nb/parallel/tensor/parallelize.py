"""Cutting an ordinary model over ranks by a plan."""

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

from axon_nb.comm.errors import TensorError
from axon_nb.comm.group import GroupLike, ProcessGroup, resolve
from axon_nb.comm.move import broadcast
from axon_nb.errors import UsageError
from axon_nb.parallel.tensor.recognise import automatic_plan
from axon_nb.parallel.tensor.report import ModuleReport, ParallelReport
from axon_nb.parallel.tensor.styles import STYLES, check_fits, style_of

__all__ = ["parallelize"]

Style = str | ParallelStyle


def parallelize(
    model: nn.Module,
    plan: Mapping[str, Style] | str = "auto",
    mesh: DeviceMesh | GroupLike | Any = None,
    *,
    sequence: bool = False,
    parallel_loss: bool = False,
) -> ParallelReport:
    """Cut the weights of a model over ranks, in place; collective.

    Every rank first gets rank 0's parameters and buffers, so seeds do not matter; parts are slices of them. Parameters
    become DTensors; make the optimizer afterwards. With data parallelism besides, `FSDP` or `fully_shard` comes next.

        parallelize(model, {"block*.attention.[qkv]*": "column", "block*.attention.out": "row",
                            "block*.up": "column", "block*.down": "row"}, mesh["tp"])

    Args:
        model: Of plain tensors.
        plan: Patterns of module names, in which ``*`` stands for anything, dots too, to a style: ``column`` (output
            features are cut), ``row`` (input features, after a column layer), ``column+gather`` and ``split+row``
            (whole on the side that is not cut), ``sequence`` (a norm), ``share`` (on a
            module whose column layers take one input: fewer sums), ``gather`` and ``split`` (of positions, at the input
            or output of any module), or one of torch's own. ``auto``: what is known to stay right, see
            `axon_nb.parallel.tensor.recognise`; the rest stays whole.
        mesh: A mesh with one axis, or a group; None: all ranks.
        sequence: Between blocks each rank has its own positions of (batch, positions, hidden): norms, residuals and
            what they keep for backward are cut as well. A plan of patterns says where, by the last three styles.
        parallel_loss: With ``auto``: the model gives this rank's part of the logits, for `parallel_cross_entropy`.

    Returns:
        What was cut how, what was not and why.

    Raises:
        TensorError: a pattern matches nothing; a module cannot be cut so, or matches two patterns; features or heads do
            not divide; a weight belongs to two modules.
        UsageError: an unknown style or plan; the model is sharded already.
    """
    group, axis = _axis(mesh, model)
    sharded = [name for name, parameter in model.named_parameters() if isinstance(parameter, DTensor)]
    if sharded:
        raise UsageError(f"{sharded[0]} is a DTensor: parallelize comes first, on a model of plain tensors.")
    why: dict[str, str] = {}
    if isinstance(plan, str):
        if plan != "auto":
            raise UsageError(f"plan={plan!r}: 'auto', or patterns of module names to styles.")
        named, why = automatic_plan(model, ranks=group.size(), sequence=sequence, parallel_loss=parallel_loss)
        styles: dict[str, Style] = dict(named)
        rest = "auto knows no way to cut it"
    else:
        styles, rest = _matched(model, plan), "no pattern matches"
    _check(model, styles, group.size())
    before = {name: _sizes(module) for name, module in model.named_modules()}
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            broadcast(tensor, group=group)
    for name, style in styles.items():
        module = model.get_submodule(name)
        made = (
            style
            if isinstance(style, ParallelStyle)
            else style_of(style, module, sequence=sequence, inside=_inside(name, styles))
        )
        parallelize_module(module, axis, made, src_data_rank=None)
    return _report(model, styles, before, why=why, rest=rest, ranks=group.size())


def _axis(mesh: Any, model: nn.Module) -> tuple[ProcessGroup, DeviceMesh]:
    group = resolve(mesh)
    if isinstance(mesh, DeviceMesh):
        return group, mesh
    device = next((parameter.device.type for parameter in model.parameters()), "cpu")
    return group, DeviceMesh.from_group(group.torch_group, device)


def _matched(model: nn.Module, plan: Mapping[str, Style]) -> dict[str, Style]:
    found: dict[str, tuple[str, Style]] = {}
    names = [name for name, _ in model.named_modules() if name]
    for pattern, style in plan.items():
        if not isinstance(style, ParallelStyle) and style not in STYLES:
            raise UsageError(f"{pattern!r}: {style!r} is no style; there are {', '.join(STYLES)}, and torch's own.")
        hits = [name for name in names if fnmatchcase(name, pattern)]
        if not hits:
            raise TensorError(f"{pattern!r} matches no module: there are {_some(names)}.")
        for name in hits:
            if name in found and found[name][1] != style:
                raise TensorError(f"{name} matches {found[name][0]!r} and {pattern!r}, with different styles.")
            found[name] = (pattern, style)
    return {name: style for name, (_, style) in found.items()}


def _inside(name: str, styles: Mapping[str, Style]) -> bool:
    above = name
    while above := above.rpartition(".")[0]:
        if styles.get(above) in ("gather", "share"):
            return True
    return False


def _check(model: nn.Module, styles: Mapping[str, Style], ranks: int) -> None:
    owners = Counter(id(parameter) for _, parameter in model.named_parameters(remove_duplicate=False))
    for name, style in styles.items():
        module = model.get_submodule(name)
        if not isinstance(style, ParallelStyle):
            check_fits(name, module, style, parent=model.get_submodule(name.rpartition(".")[0]), ranks=ranks)
        if any(owners[id(parameter)] > 1 for parameter in module.parameters(recurse=False)):
            raise TensorError(f"{name} shares a parameter with another module: cut, it would be two; leave it whole.")


def _sizes(module: nn.Module) -> dict[str, tuple[tuple[int, ...], int]]:
    return {name: (tuple(p.shape), p.nbytes) for name, p in module.named_parameters(recurse=False)}


def _report(
    model: nn.Module,
    styles: Mapping[str, Style],
    before: Mapping[str, dict[str, tuple[tuple[int, ...], int]]],
    *,
    why: Mapping[str, str],
    rest: str,
    ranks: int,
) -> ParallelReport:
    rows = []
    for name, module in model.named_modules():
        if not before[name] and name not in styles:
            continue
        style = styles.get(name, "")
        here = 0
        shapes = []
        for key, parameter in module.named_parameters(recurse=False):
            local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
            here += local.nbytes
            shape, own = _shown(before[name][key][0]), _shown(tuple(local.shape))
            shapes.append(f"{key} {shape}" if shape == own else f"{key} {shape} -> {own}")
        rows.append(
            ModuleReport(
                name,
                type(module).__name__,
                style if isinstance(style, str) else type(style).__name__,
                sum(size for _, size in before[name].values()),
                here,
                ", ".join(shapes),
                "" if name in styles else why.get(name, rest),
            )
        )
    return ParallelReport(ranks, tuple(rows))


def _shown(shape: tuple[int, ...]) -> str:
    return "x".join(map(str, shape)) or "1"


def _some(names: list[str]) -> str:
    more = f" and {len(names) - 8} more" if len(names) > 8 else ""
    return ", ".join(names[:8]) + more
