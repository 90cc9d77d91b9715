"""The stages of a pipeline and the microbatches of a step: how a model and a batch are split.

Stages are given by the user, or split from a Sequential, at given names or into parts of about equal cost. Those that
one rank holds go by their names in the whole model. A batch is validated on all ranks before anything runs.
"""

from __future__ import annotations

import itertools
import math
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_leaves, tree_map

from axon_nb.comm.collectives.direct import all_gather_single
from axon_nb.comm.collectives.movement import broadcast
from axon_nb.comm.group import Backend, ProcessGroup
from axon_nb.errors import UsageError
from axon_nb.parallel.loop import clip_grad_norm
from axon_nb.parallel.pipeline.schedule import PipelineSchedule, stages_of_rank

Cost = Literal["params", "time"] | Callable[[nn.Module], float]
"""What to balance: the number of parameters, the measured time, or a function of one module."""


class Section(nn.Sequential):
    """Consecutive children of a larger Sequential, under their names there."""


def split_sections(model: nn.Module, starts: Sequence[str]) -> list[Section]:
    """Split the children of a Sequential into sections; each but the first starts at one of `starts`.

    Raises:
        UsageError: the model is not a Sequential, or has no children of these names in this order.
    """
    children = _children(model)
    names = list(children)
    unknown = [name for name in starts if name not in names]
    if unknown:
        raise UsageError(f"at: the model has no child {unknown[0]!r}; its children are {', '.join(names)}.")
    bounds = [0, *(names.index(name) for name in starts), len(names)]
    if any(first >= second for first, second in itertools.pairwise(bounds)):
        raise UsageError(
            f"at must list children in the model's order, without the first one ({names[0]}), as each starts the next "
            f"stage; got {list(starts)}."
        )
    items = list(children.items())
    return [Section(OrderedDict(items[first:second])) for first, second in itertools.pairwise(bounds)]


def child_costs(model: nn.Module, by: Cost, sample: Any = None) -> dict[str, float]:
    """Return the cost of each child of a Sequential.

    Args:
        model: The model.
        by: What to count.
        sample: An input of the model for "time", such as one microbatch.

    Raises:
        UsageError: `by` is unknown, or is "time" without a sample.
    """
    children = _children(model)
    if callable(by):
        return {name: float(by(child)) for name, child in children.items()}
    if by == "params":
        return {name: float(sum(p.numel() for p in child.parameters())) for name, child in children.items()}
    if by != "time":
        raise UsageError(f"split must be 'params', 'time' or a function that returns the cost of a module; got {by!r}.")
    if sample is None:
        raise UsageError("split='time' needs sample=, such as the inputs of one microbatch, to measure the model.")
    return dict(zip(children, _measure_seconds(list(children.values()), sample), strict=True))


def balance(costs: Sequence[float], parts: int) -> list[int]:
    """Return the start of each of `parts` consecutive parts so that the most expensive part costs least.

    Among equal solutions, the costs are as even as possible (least sum of squares). No part is empty.

    Raises:
        UsageError: there are fewer costs than parts, or one is negative.
    """
    if not 1 <= parts <= len(costs):
        raise UsageError(f"num_stages must be 1 to {len(costs)}, the number of modules; got {parts}.")
    if any(not cost >= 0 for cost in costs):
        raise UsageError(f"costs must be 0 or more; got {list(costs)}.")
    sums = [0.0, *itertools.accumulate(costs)]
    highest, _ = _best_split(sums, parts, lambda cost: cost, max)
    limit = highest * (1 + 1e-9)
    _, starts = _best_split(sums, parts, lambda cost: cost * cost if cost <= limit else math.inf, lambda a, b: a + b)
    return starts


def _children(model: nn.Module) -> dict[str, nn.Module]:
    if not isinstance(model, nn.Sequential):
        raise UsageError(
            f"{type(model).__name__} is not an nn.Sequential, so the order of its children is unknown. Pass the stages "
            "themselves: Pipeline.from_modules([first, second, …])."
        )
    return dict(model.named_children())


def _best_split(
    sums: list[float], parts: int, price: Callable[[float], float], join: Callable[[float, float], float]
) -> tuple[float, list[int]]:
    """Find the best split by dynamic programming: its value, and the start of each part."""
    count = len(sums) - 1
    best = [[math.inf] * (count + 1) for _ in range(parts + 1)]
    start = [[0] * (count + 1) for _ in range(parts + 1)]
    best[0][0] = 0.0
    for part in range(1, parts + 1):
        for end in range(part, count - parts + part + 1):
            for begin in range(part - 1, end):
                value = join(best[part - 1][begin], price(sums[end] - sums[begin]))
                if value < best[part][end]:
                    best[part][end], start[part][end] = value, begin
    starts, end = [], count
    for part in range(parts, 0, -1):
        end = start[part][end]
        starts.append(end)
    return best[parts][count], starts[::-1]


def _measure_seconds(children: list[nn.Module], sample: Any, repeats: int = 3) -> list[float]:
    """Measure forward and backward of each child, in seconds; the minimum of several runs."""
    buffers = [buffer for child in children for buffer in child.buffers()]
    saved = [buffer.clone() for buffer in buffers]
    shortest = [math.inf] * len(children)
    with torch.random.fork_rng(), torch.enable_grad():
        for _ in range(repeats + 1):
            value = sample
            for number, child in enumerate(children):
                seconds, value = _time_once(child, value)
                shortest[number] = min(shortest[number], seconds)
    with torch.no_grad():
        for buffer, before in zip(buffers, saved, strict=True):
            buffer.copy_(before)
    return shortest


def _time_once(child: nn.Module, value: Any) -> tuple[float, Any]:
    """Run one forward and backward; return the seconds and the output."""
    leaves = tree_map(_as_leaf, value)
    args = leaves if isinstance(leaves, tuple) else (leaves,)
    sources = [tensor for tensor in (*_tensors(args), *child.parameters()) if tensor.requires_grad]
    _wait_for_device()
    start = time.perf_counter()
    output = child(*args)
    outputs = [tensor for tensor in _tensors(output) if tensor.requires_grad]
    if sources and outputs:
        torch.autograd.grad(outputs, sources, [torch.ones_like(out) for out in outputs], allow_unused=True)
    _wait_for_device()
    return time.perf_counter() - start, tree_map(_as_leaf, output)


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    return (leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor))


def _as_leaf(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    return value.detach().requires_grad_(value.is_floating_point())


def _wait_for_device() -> None:
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()


def balanced_stage_starts(
    model: nn.Module, by: Cost, num_stages: int, *, sample: Any, group: ProcessGroup
) -> list[str]:
    """Return the children that start a stage, except the first; the same on all ranks. Collective for "time"."""
    costs = child_costs(model, by, sample)
    values = list(costs.values())
    if by == "time" and group.size() > 1:
        own = torch.tensor(values, dtype=torch.float64, device="cpu")
        values = broadcast(own.cuda() if group.backend is Backend.NCCL else own, group=group).tolist()
    return [list(costs)[start] for start in balance(values, num_stages)[1:]]


@dataclass(frozen=True, slots=True)
class PipelineStage:
    """A module and its device: `Pipeline([PipelineStage(first, "cuda:0"), PipelineStage(second, "cuda:1")])`."""

    module: nn.Module | Callable[[], nn.Module]
    """The module, or a function without arguments that creates it; only called on the rank that holds the stage."""
    device: torch.device | str | None = None
    """None: where its parameters are."""

    def make(self) -> nn.Module:
        """Return the module, creating it if necessary."""
        return self.module if isinstance(self.module, nn.Module) else self.module()


def stage_device(device: torch.device | str | None, stage: nn.Module, group: ProcessGroup) -> torch.device:
    """Return a stage's device: the given one, or that of its parameters; with NCCL, this rank's GPU."""
    if device is not None:
        return torch.device(device)
    parameter = next(stage.parameters(), None)
    if group.backend is Backend.NCCL and (parameter is None or not parameter.is_cuda):
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu") if parameter is None else parameter.device


def check_no_shared_parameters(stages: Sequence[PipelineStage]) -> None:
    """Check that no two stages share a parameter: each rank would train its own copy.

    Raises:
        UsageError: two stages share a parameter.
    """
    owner: dict[int, tuple[int, str]] = {}
    for index, stage in enumerate(stages):
        if not isinstance(stage.module, nn.Module):
            continue
        for name, parameter in stage.module.named_parameters():
            first, first_name = owner.setdefault(id(parameter), (index, name))
            if first != index:
                raise UsageError(
                    f"{name} of stage {index} is also {first_name} of stage {first}. Stages cannot share parameters, "
                    "as each rank would train its own copy."
                )


class HeldStages(nn.Module):
    """Holds this rank's stages; the others are dropped.

    Args:
        stages: All stages, in order.
        group: The ranks of the pipeline.
        schedule: Determines which stages a rank holds.
        device: Device of stages that specify none.
        wrap: Called with each of this rank's stages; returns the module that computes.

    Raises:
        UsageError: a stage is in DDP or FSDP, and the schedule computes its gradients without their hooks.
    """

    def __init__(
        self,
        stages: Sequence[PipelineStage],
        group: ProcessGroup,
        schedule: PipelineSchedule,
        *,
        device: torch.device | str | None,
        wrap: Callable[[nn.Module], nn.Module] | None,
    ) -> None:
        super().__init__()
        self._group = group
        self.schedule = schedule
        self.num_stages = len(stages)
        self.module = nn.Module()
        """This rank's part of the model."""
        self.devices: dict[int, torch.device] = {}
        """Of each of this rank's stages, by its index."""
        self._stage_modules: dict[int, nn.Module] = {}
        for index in self._stages_on(group.rank()):
            stage = stages[index].make()
            self.devices[index] = stage_device(stages[index].device or device, stage, group)
            stage.to(self.devices[index])
            for name, child in stage.named_children() if isinstance(stage, Section) else [(str(index), stage)]:
                self.module.add_module(name, child)
            self._stage_modules[index] = stage if wrap is None else wrap(stage)
            if schedule.splits_backward and (kind := _kind_with_hooks(self._stage_modules[index])):
                raise UsageError(
                    f"{schedule.value} computes weight gradients without the hooks of {kind}; use torch's fully_shard "
                    "on the whole stage, or a schedule with undivided backwards, such as Interleaved1F1B."
                )

    @property
    def group(self) -> ProcessGroup:
        """The ranks of the pipeline."""
        return self._group

    @property
    def stage_indices(self) -> tuple[int, ...]:
        """Indices of this rank's stages."""
        return tuple(self._stage_modules)

    @property
    def is_first(self) -> bool:
        """Whether this rank has the first stage, and needs the inputs."""
        return 0 in self._stage_modules

    @property
    def is_last(self) -> bool:
        """Whether this rank has the last stage, and needs the targets."""
        return self.num_stages - 1 in self._stage_modules

    @property
    def last_rank(self) -> int:
        """The group rank with the last stage; rank 0 if the stages form a V."""
        return self._rank_of(self.num_stages - 1)

    def stage_ranks(self) -> dict[int, int]:
        """Return the global rank of each stage."""
        return {stage: self._group.ranks[self._rank_of(stage)] for stage in range(self.num_stages)}

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield this rank's parameters by their names in the whole model."""
        return self.module.named_parameters(prefix, recurse, remove_duplicate)

    def named_buffers(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield this rank's buffers by their names in the whole model."""
        return self.module.named_buffers(prefix, recurse, remove_duplicate)

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
        """Return this rank's part of the whole model's state."""
        state: dict[str, Any] = self.module.state_dict(*args, **kwargs)
        return state

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Load this rank's part of a state, which may be that of the whole model."""
        expected = self.module.state_dict()
        part = {name: value for name, value in state_dict.items() if name in expected}
        return self.module.load_state_dict(part, strict=strict, assign=assign)

    def clip_grad_norm(self, max_norm: float, *, norm_type: float = 2.0, error_if_nonfinite: bool = False) -> float:
        """Clip by the norm over the gradients of all stages, like `axon_nb.parallel.clip_grad_norm`. Collective."""
        return clip_grad_norm(
            self.module,
            max_norm,
            norm_type=norm_type,
            groups=self._group,
            error_if_nonfinite=error_if_nonfinite,
        )

    def _stages_on(self, rank: int) -> list[int]:
        return stages_of_rank(self.schedule, rank, num_ranks=self._group.size(), num_stages=self.num_stages)

    def _rank_of(self, stage: int) -> int:
        return next(rank for rank in range(self._group.size()) if stage in self._stages_on(rank))


def _kind_with_hooks(stage: nn.Module) -> str:
    """Name what averages this stage's gradients in hooks; empty: nothing, or torch's FSDP2, which pipelines know."""
    if isinstance(stage, DistributedDataParallel):
        return "DDP"
    is_inside = not isinstance(stage, FSDPModule) and any(isinstance(part, FSDPModule) for part in stage.modules())
    return "FSDP inside a module" if is_inside else ""


def as_args(x: Any) -> tuple[Any, ...]:
    """Return the arguments of the first stage; a tuple holds several."""
    return x if isinstance(x, tuple) else (x,)


def describe_args(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return shape, dtype and requires_grad of each tensor argument."""
    return tuple((tuple(arg.shape), arg.dtype, arg.requires_grad) for arg in args if isinstance(arg, torch.Tensor))


def find_problem(name: str, value: Any, num_microbatches: int, *, several: bool = False) -> str | None:
    """Return why a value cannot be split into microbatches; None if it can.

    Args:
        name: Name of the value, for the message.
        value: A tensor; with `several`, possibly a tuple of them.
        num_microbatches: Number of microbatches.
        several: Whether a tuple of tensors is allowed.
    """
    if value is None:
        return f"{name} is missing"
    parts = value if several and isinstance(value, tuple) else (value,)
    invalid = [part for part in parts if not isinstance(part, torch.Tensor) or part.ndim == 0]
    if invalid or not parts:
        kinds = "a tensor, or a tuple of tensors," if several else "a tensor"
        what = (
            "a scalar"
            if invalid and isinstance(invalid[0], torch.Tensor)
            else type(invalid[0]).__name__
            if invalid
            else "nothing"
        )
        return f"{name} must be {kinds} with samples along dim 0; got {what}"
    counts = sorted({len(part) for part in parts})
    if len(counts) > 1:
        return f"the tensors of {name} must have equally many samples; got {' and '.join(map(str, counts))}"
    rows = counts[0]
    if rows == 0 or rows % num_microbatches:
        fewer, more = rows // num_microbatches * num_microbatches, -(-max(rows, 1) // num_microbatches)
        fits = " or ".join(str(n) for n in (fewer, more * num_microbatches) if n)
        return (
            f"{name}: the number of samples must be divisible by num_microbatches ({num_microbatches}); got {rows}. "
            f"Use a batch of {fits} samples"
        )
    return None


def microbatches_of(
    name: str, whole: Any, count: int, split_name: str = "", split: Any = None, *, several: bool = False
) -> tuple[list[tuple[torch.Tensor, ...]], str | None]:
    """Return the arguments of each microbatch of a batch; else none, and why.

    Args:
        name: Name of the whole batch, for the message.
        whole: The batch: a tensor; with `several`, possibly a tuple of them.
        count: Number of microbatches.
        split_name: Name of `split`.
        split: The same, already split; None: not given.
        several: Whether a tuple of tensors is allowed.
    """
    if split is None:
        if problem := find_problem(name, whole, count, several=several):
            return [], problem
        return list(zip(*(arg.chunk(count) for arg in as_args(whole)), strict=True)), None
    if whole is not None:
        return [], f"pass {name} or {split_name}, not both"
    if problem := find_problem_of_split(split_name, split, count):
        return [], problem
    each = (find_problem(f"{split_name}[{number}]", part, 1, several=several) for number, part in enumerate(split))
    if problem := next(filter(None, each), None):
        return [], problem
    parts = [as_args(part) for part in split]
    kinds = list(dict.fromkeys(map(describe_args, parts)))
    if len(kinds) > 1:
        first, other = ([f"{list(shape)} {dtype}" for shape, dtype, _ in kind] for kind in kinds[:2])
        return [], (
            f"all microbatches of {split_name} must have the same shapes and types; got {', '.join(first)} and "
            f"{', '.join(other)}"
        )
    return parts, None


def find_problem_of_split(name: str, split: Any, count: int) -> str | None:
    """Return why these are not the microbatches of a step, whatever is in them."""
    if isinstance(split, list) and len(split) == count:
        return None
    got = len(split) if isinstance(split, list) else type(split).__name__
    return f"{name} must be a list of num_microbatches ({count}) parts; got {got}"


def join_microbatches(outputs: list[Any]) -> Any:
    """Join the outputs of all microbatches to one batch: concatenated along dim 0, scalars stacked."""

    def join(*parts: Any) -> Any:
        if not isinstance(parts[0], torch.Tensor):
            return list(parts)
        return torch.cat(parts) if parts[0].ndim else torch.stack(parts)

    return tree_map(join, *outputs)


def agree(group: ProcessGroup, problem: str | None, *numbers: int) -> list[list[int]]:
    """Exchange some numbers with all ranks of the group, and raise if any rank cannot continue. Collective.

    Args:
        group: The pipeline's ranks.
        problem: Why this rank cannot continue; None if it can.
        *numbers: Numbers to exchange; equally many on all ranks.

    Returns:
        The numbers of each rank.

    Raises:
        UsageError: a rank cannot continue; raised on all ranks, so that none waits.
    """
    device = torch.device("cuda", torch.cuda.current_device()) if group.backend is Backend.NCCL else torch.device("cpu")
    local = torch.tensor([problem is not None, *numbers], dtype=torch.int64, device=device)
    everyone = torch.empty(group.size() * len(local), dtype=torch.int64, device=device)
    all_gather_single(everyone, local, group=group.torch_group)
    rows: list[list[int]] = everyone.view(group.size(), -1).tolist()
    if any(row[0] for row in rows):
        texts: list[Any] = [None] * group.size()
        dist.all_gather_object(texts, problem, group=group.torch_group)
        raise UsageError(_first_problem(texts, group))
    return [row[1:] for row in rows]


def _first_problem(texts: Iterable[str | None], group: ProcessGroup) -> str:
    rank, text = next((rank, text) for rank, text in zip(group.ranks, texts, strict=True) if text is not None)
    return f"{text} (on rank {rank})."
