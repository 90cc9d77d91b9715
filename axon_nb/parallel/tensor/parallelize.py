"""Shard an ordinary model over ranks by a plan, and report how each module is sharded, or why not.

A plan gives modules styles, by name. `auto` chooses those known to compute the same, and follows the plans that models
of transformers bring along.
"""

from __future__ import annotations

import html
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from axon_nb.comm.collectives.movement import broadcast
from axon_nb.comm.errors import TensorError
from axon_nb.comm.group import GroupLike, ProcessGroup, resolve
from axon_nb.errors import UsageError
from axon_nb.parallel.models import GPT, Attention, Block, Embedding, Head
from axon_nb.parallel.tensor.functions import split_sequence
from axon_nb.parallel.tensor.layouts import HEAD_COUNTS, HEAD_SIZES
from axon_nb.records.units import aligned, count_of, format_bytes

Style = str | ParallelStyle
_HEADER = ("module", "type", "style", "parameters", "local", "reason")
STYLES = {
    "column": "shard the output features; the output is this rank's part",
    "column+gather": "shard the output features; gather the output",
    "row": "shard the input features, as a column layer before provides them; sum the outputs",
    "split+row": "shard the input features of a replicated input; sum the outputs",
    "sequence": "apply a norm to this rank's positions",
    "heads": "apply a norm to this rank's heads: (batch, positions, heads, head size)",
    "share": "compute one backward sum for several column layers inside that use the same input",
    "gather": "like share, and also gather the positions of the input",
    "split": "keep this rank's positions of the output",
}
"""Names of the styles, and what each does."""
SHARD_DIM = {"column": 0, "column+gather": 0, "row": 1, "split+row": 1}
"""The dimension of a linear layer's weight that a style shards."""
_POSITIONS = Shard(1)
"""Layout of activations sharded by position: (batch, positions, features)."""
_ELEMENTWISE = (
    nn.GELU,
    nn.ReLU,
    nn.SiLU,
    nn.Tanh,
    nn.Sigmoid,
    nn.ELU,
    nn.Mish,
    nn.LeakyReLU,
    nn.Hardswish,
    nn.Identity,
)
"""Modules allowed between a column and a row layer: each rank applies them to its own features."""
_STYLES = {
    "colwise": "column",
    "rowwise": "row",
    "colwise_gather_output": "column+gather",
    "colwise_rep": "column+gather",
    "rowwise_split_input": "split+row",
    "local_colwise": "column",
    "local_rowwise": "row",
}
"""Ours by transformers' names. Others, such as those of experts, are left out: these modules stay whole."""
_CHANGED_IN_PLACE = ".shared_expert"
"""Llama 4 adds to the output of these modules in place, which autograd refuses for the output of a DTensor layer."""


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
            `axon_nb.parallel.tensor.parallelize`; the rest is not sharded.
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
    if not isinstance(plan, Mapping):
        if plan != "auto":
            hint = " Name the mesh: `mesh=…`." if isinstance(plan, DeviceMesh | ProcessGroup) else ""
            raise UsageError(f"plan must be 'auto' or map patterns of module names to styles; got {plan!r}.{hint}")
        named, reasons = automatic_plan(model, num_ranks=group.size(), sequence=sequence, parallel_loss=parallel_loss)
        styles: dict[str, Style] = dict(named)
        default_reason = "stays whole with 'auto'"
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
            else create_style(style, module, sequence=sequence, inside=has_prepared_input(name, styles))
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


def has_prepared_input(name: str, styles: Mapping[str, Style]) -> bool:
    """Whether a module around this one prepares its input for several column layers."""
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


@dataclass(frozen=True, slots=True)
class ModuleReport:
    """A module that has its own parameters or is named by a plan."""

    name: str
    kind: str
    """Name of its class."""
    style: str
    """Parallel style; empty if it is not sharded."""
    total_bytes: int
    """Bytes of its own parameters in the whole model."""
    local_bytes: int
    """Bytes of its own parameters on this rank."""
    shapes: str
    """Shapes of its parameters, before and after sharding."""
    reason: str = ""
    """Why it is not sharded."""


@dataclass(frozen=True)
class ParallelReport:
    """Result of `parallelize`; print it, or show it as a table in a notebook."""

    num_ranks: int
    """Number of ranks that share the model."""
    modules: tuple[ModuleReport, ...]

    @property
    def total_bytes(self) -> int:
        """Bytes of the whole model's parameters."""
        return sum(module.total_bytes for module in self.modules)

    @property
    def local_bytes(self) -> int:
        """Bytes of parameters on this rank."""
        return sum(module.local_bytes for module in self.modules)

    def style(self, name: str) -> str:
        """Return the parallel style of a module; empty if it is not sharded or has no parameters."""
        return next((module.style for module in self.modules if module.name == name), "")

    def _summary(self) -> str:
        num_sharded = sum(module.style != "" for module in self.modules)
        return (
            f"{num_sharded} of {len(self.modules)} modules sharded over {count_of(self.num_ranks, 'rank')}: "
            f"{format_bytes(self.local_bytes)} of {format_bytes(self.total_bytes)} of parameters on this rank"
        )

    def _rows(self) -> Iterator[tuple[str, ...]]:
        """Yield table rows; modules whose names differ only in numbers share a row."""
        rows_by_key: dict[tuple[str, ...], list[ModuleReport]] = {}
        for module in self.modules:
            pattern = re.sub(r"\d+", "*", module.name)
            # A reason may name the module or a sibling: block0.up and block1.up should get the same text.
            reason = re.sub(
                r"\d+(?=\.\w)", "*", module.reason.replace(f"{module.name}.", "").removeprefix(module.name)
            ).strip()
            rows_by_key.setdefault((pattern, module.kind, module.style, module.shapes, reason), []).append(module)
        for (pattern, kind, style, shapes, reason), group in rows_by_key.items():
            name = f"{pattern} ({len(group)})" if len(group) > 1 else group[0].name or "(the model)"
            local_text = format_bytes(sum(module.local_bytes for module in group))
            yield name, kind, style or "replicated", shapes, local_text, reason

    def __str__(self) -> str:
        return "\n".join([self._summary(), *aligned([_HEADER, *self._rows()])])

    __repr__ = __str__

    def _repr_html_(self) -> str:
        def row(cells: tuple[str, ...], tag: str) -> str:
            return (
                "<tr>"
                + "".join(f"<{tag} style='text-align:left'>{html.escape(cell)}</{tag}>" for cell in cells)
                + "</tr>"
            )

        body = "".join(row(cells, "td") for cells in self._rows())
        table = f"<table><caption>{html.escape(self._summary())}</caption>{row(_HEADER, 'th')}{body}</table>"
        used = {module.style for module in self.modules}
        meanings = (f"<br><b>{name}</b>: {html.escape(text)}" for name, text in STYLES.items() if name in used)
        return f"{table}<small>replicated: a copy on each rank{''.join(meanings)}</small>"


class _SplitOutput(ParallelStyle):
    """Keeps this rank's positions of the output."""

    def __init__(self) -> None:
        super().__init__()

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        group = ProcessGroup.wrap(device_mesh.get_group())
        module.register_forward_hook(lambda _, __, output: split_sequence(output, group))
        return module


def create_style(name: str, module: nn.Module, *, sequence: bool, inside: bool) -> ParallelStyle:
    """Create torch's style for a name.

    Args:
        name: One of `STYLES`.
        module: The module it is for.
        sequence: Whether activations between blocks are sharded along the sequence.
        inside: Whether a parent module has the style `share` or `gather`, which prepares the input.
    """
    replicated, between = Replicate(), _POSITIONS if sequence else Replicate()
    # A replicated input must not be declared as sharded: each layer that uses it would then add a sum in backward.
    input_layout = replicated if inside or isinstance(module, nn.Embedding) else between
    embedding = isinstance(module, nn.Embedding)
    factories: dict[str, Any] = {
        "column": lambda: ColwiseParallel(input_layouts=input_layout),
        "column+gather": lambda: ColwiseParallel(input_layouts=input_layout, output_layouts=replicated),
        "row": lambda: RowwiseParallel(input_layouts=replicated if embedding else Shard(-1), output_layouts=between),
        "split+row": lambda: RowwiseParallel(input_layouts=replicated, output_layouts=between),
        "sequence": lambda: SequenceParallel(use_local_output=True),
        "heads": lambda: SequenceParallel(sequence_dim=2, use_local_output=True),
        "gather": lambda: PrepareModuleInput(
            input_layouts=(_POSITIONS,), desired_input_layouts=(replicated,), use_local_output=False
        ),
        "share": lambda: PrepareModuleInput(
            input_layouts=(replicated,), desired_input_layouts=(replicated,), use_local_output=False
        ),
        "split": _SplitOutput,
    }
    style: ParallelStyle = factories[name]()
    return style


def check_divisible(path: str, module: nn.Module, style: str, *, parent: nn.Module | None, num_ranks: int) -> None:
    """Check that a style can shard a module over `num_ranks` ranks.

    Raises:
        TensorError: the module has another type, or its features or its parent's heads are not divisible.
    """
    if style not in SHARD_DIM:
        return
    if not isinstance(module, nn.Linear | nn.Embedding):
        raise TensorError(f"{path}: style {style!r} supports nn.Linear and nn.Embedding; got {type(module).__name__}.")
    if isinstance(module, nn.Linear):
        what = "in_features" if SHARD_DIM[style] else "out_features"
    else:
        what = "num_embeddings" if SHARD_DIM[style] else "embedding_dim"
    size = int(getattr(module, what))
    if size % num_ranks:
        raise TensorError(
            f"{path}.{what} must be divisible by the group size ({num_ranks}); got {size}. The next multiple is "
            f"{-(-size // num_ranks) * num_ranks}."
        )
    heads = _heads(parent, size) if isinstance(module, nn.Linear) and style == "column" else None
    if heads and heads % num_ranks:
        raise TensorError(
            f"{path}: the number of heads must be divisible by the group size ({num_ranks}); got {heads}."
        )


def _heads(parent: nn.Module | None, features: int) -> int | None:
    for name in HEAD_SIZES:
        if isinstance(size := getattr(parent, name, None), int) and size > 0:
            return features // size
    for name in HEAD_COUNTS:
        if isinstance(count := getattr(parent, name, None), int) and count > 0:
            return count
    return None


def automatic_plan(
    model: nn.Module, *, num_ranks: int, sequence: bool, parallel_loss: bool
) -> tuple[dict[str, str], dict[str, str]]:
    """Return styles by module, and reasons by known module that cannot be sharded.

    Known are the modules of `axon_nb.parallel.models.GPT`, those in the `tp_plan` of a Hugging Face model, and two
    linear layers with an elementwise activation between them inside an `nn.Sequential`.

    Raises:
        TensorError: `sequence` is set for another model than that GPT, or its sizes are not divisible.
    """
    if sequence and not isinstance(model, GPT):
        raise TensorError(
            "sequence=True with plan='auto' supports only the GPT of axon_nb.parallel.models; got a "
            f"{type(model).__name__}. Pass a plan with 'sequence', 'gather' and 'split'."
        )
    plan: dict[str, str] = {}
    skipped: dict[str, str] = {}
    positions: dict[str, str] = {}
    units = list(named_units(model))
    for path, module in model.named_modules():
        units += [_full_names(path, unit) for unit in _units(module, parallel_loss=parallel_loss)]
        if sequence:
            positions |= _full_names(path, _sequence_styles(module))
    for unit in units:
        try:
            for name, style in unit.items():
                inner = model.get_submodule(name)
                parent = model.get_submodule(name.rpartition(".")[0])
                check_divisible(name, inner, style, parent=parent, num_ranks=num_ranks)
        except TensorError as error:
            if sequence:
                raise
            # All of the unit or nothing: a column layer alone would pass only a part to its unsharded row layer.
            skipped |= dict.fromkeys(unit, str(error))
            continue
        plan |= unit
    return plan | positions, skipped


def _full_names(path: str, styles: Mapping[str, str]) -> dict[str, str]:
    """Return styles with the names of modules in the model."""
    return {".".join(filter(None, (path, name))): style for name, style in styles.items()}


def _units(module: nn.Module, *, parallel_loss: bool) -> list[dict[str, str]]:
    if isinstance(module, Attention):
        return [{"": "share", "query": "column", "key": "column", "value": "column", "out": "row"}]
    if isinstance(module, Block):
        return [{"up": "column", "down": "row"}]
    if isinstance(module, Head):
        return [{"logits": "column" if parallel_loss else "column+gather"}]
    return _pairs(module) if isinstance(module, nn.Sequential) else []


def _pairs(module: nn.Sequential) -> list[dict[str, str]]:
    pairs, first = [], ""
    for name, child in module.named_children():
        if isinstance(child, nn.Linear):
            if first:
                pairs.append({first: "column", name: "row"})
                first = ""
            else:
                first = name
        elif not isinstance(child, _ELEMENTWISE):
            first = ""
    return pairs


def _sequence_styles(module: nn.Module) -> dict[str, str]:
    if isinstance(module, Embedding):
        return {"": "split"}
    if isinstance(module, Attention):
        return {"": "gather"}
    if isinstance(module, Block):
        return {"norm1": "sequence", "norm2": "sequence"}
    return {"norm": "sequence"} if isinstance(module, Head) else {}


def named_units(model: nn.Module) -> Iterator[dict[str, str]]:
    """Yield the styles of linear layers that are sharded together, by name: an attention, an MLP, the head.

    A norm of single heads inside an attention gets the style ``heads``. A unit with other parameters than those of the
    plan is left out, because nothing says what they are to do with a part of the features.
    """
    owners = Counter(id(parameter) for _, parameter in model.named_parameters(remove_duplicate=False))
    for path, inner in _planned(model):
        patterns = {re.compile(re.escape(name).replace(r"\*", r"\d+")): style for name, style in inner.tp_plan.items()}
        units: dict[str, dict[str, str]] = {}
        for name, module in inner.named_modules():
            style = next((style for pattern, style in patterns.items() if pattern.fullmatch(name)), "")
            # A head that shares its weight with the embedding stays whole.
            is_tied = any(owners[id(parameter)] > 1 for parameter in module.parameters(recurse=False))
            if isinstance(module, nn.Linear) and style in _STYLES and not is_tied:
                units.setdefault(name.rpartition(".")[0], {})[name] = _STYLES[style]
        for parent, unit in units.items():
            if parent.endswith(_CHANGED_IN_PLACE):
                continue
            norms = _norms(inner.get_submodule(parent), parent, unit) if "column" in unit.values() else {}
            if norms is not None:
                yield {path + name: style for name, style in (unit | norms).items()}


def _planned(module: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the outermost modules that have a plan."""
    if isinstance(getattr(module, "tp_plan", None), dict) and module.tp_plan:
        yield path, module
        return
    for name, child in module.named_children():
        yield from _planned(child, f"{path}{name}.")


def _norms(parent: nn.Module, path: str, unit: dict[str, str]) -> dict[str, str] | None:
    """Return the norms of single heads in a module; None: it has other parameters besides."""
    norms = {}
    size = getattr(parent, "head_dim", None)
    if any(True for _ in parent.parameters(recurse=False)):
        return None
    for name, child in parent.named_children():
        full = f"{path}.{name}"
        if full in unit:
            continue
        shapes = [tuple(parameter.shape) for parameter in child.parameters()]
        if shapes and shapes != [(size,)]:
            return None
        if shapes:
            norms[full] = "heads"
    return norms
