"""Pipeline parallelism: a model cut into stages, each on one rank, and a batch cut into microbatches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypedDict, Unpack

import torch
from torch import nn

from axon_nb.comm.group import GroupLike, resolve
from axon_nb.comm.move import broadcast
from axon_nb.errors import UsageError
from axon_nb.parallel.pipeline.batch import agree, as_args, described, merged, microbatches, refused, rows_of
from axon_nb.parallel.pipeline.forward import ForwardPass
from axon_nb.parallel.pipeline.held import HeldStages
from axon_nb.parallel.pipeline.memory import PipelineMemoryStats
from axon_nb.parallel.pipeline.runner import Runner
from axon_nb.parallel.pipeline.schedule import PipelineSchedule, check_counts, default_num_stages
from axon_nb.parallel.pipeline.split import Cost, balanced_starts, sections
from axon_nb.parallel.pipeline.stage import PipelineStage, check_apart

__all__ = ["Loss", "Pipeline", "PipelineOptions"]

Loss = Callable[[Any, Any], torch.Tensor]
"""From the output and the target of one microbatch to a mean over its samples."""


class PipelineOptions(TypedDict, total=False):
    """Keyword arguments of `Pipeline`."""

    num_microbatches: int | None
    schedule: PipelineSchedule | str
    loss: Loss | None
    device: torch.device | str | None
    wrap: Callable[[nn.Module], nn.Module] | None
    spans: bool


class Pipeline(HeldStages):
    """Every rank keeps one stage of the model, or several; microbatches flow through them.

    `step(x, target)` trains: afterwards gradients are those of one process, for the mean of the loss over the batch.
    `pipe(x)` is a forward without gradients. Names of parameters are those of the whole model; `module` holds this
    rank's part of it.

    Args:
        stages: All stages in order: modules, or `PipelineStage`s. Only this rank's are kept.
        group: A World, a group of ours or of torch's, a mesh with one axis; None: all ranks.
        num_microbatches: Parts of a batch; None: as many as stages.
        schedule: In which order ranks compute; a `PipelineSchedule`, or its name.
        loss: Mean loss of one microbatch, from output and target; None: `step` is given it.
        device: Where stages compute that do not say; None: where their parameters are.
        wrap: Called with each of this rank's stages; what it returns computes, such as the stage in DDP.
        spans: Record every action, with stage and microbatch.

    Raises:
        UsageError: numbers of ranks, stages and microbatches do not fit the schedule; two stages share a parameter.
        NotInGroupError: this rank is no member of the group.
    """

    def __init__(
        self,
        stages: Sequence[nn.Module | PipelineStage],
        group: GroupLike | Any = None,
        *,
        num_microbatches: int | None = None,
        schedule: PipelineSchedule | str = PipelineSchedule.ONE_F_ONE_B,
        loss: Loss | None = None,
        device: torch.device | str | None = None,
        wrap: Callable[[nn.Module], nn.Module] | None = None,
        spans: bool = True,
    ) -> None:
        given = [stage if isinstance(stage, PipelineStage) else PipelineStage(stage) for stage in stages]
        own, chosen = resolve(group), PipelineSchedule.of(schedule)
        count = len(given) if num_microbatches is None else num_microbatches
        check_counts(chosen, num_ranks=own.size(), num_stages=len(given), num_microbatches=count)
        check_apart(given)
        super().__init__(given, own, chosen, device=device, wrap=wrap)
        self.num_microbatches = count
        self._loss = (loss,)  # in a tuple: a loss that is a module is no part of this one
        self._step_loss: tuple[Loss | None] = (None,)
        self._losses: list[torch.Tensor] = []
        self._spans = spans
        self._runner: Runner | None = None
        self._made_for: tuple[Any, ...] = ()

    @classmethod
    def from_modules(
        cls, modules: Sequence[nn.Module], group: GroupLike | Any = None, **options: Unpack[PipelineOptions]
    ) -> Pipeline:
        """A pipeline of these stages; their names are "0", "1", …, as in `nn.Sequential(*modules)`."""
        return cls(modules, group, **options)

    @classmethod
    def split(
        cls,
        model: nn.Module,
        group: GroupLike | Any = None,
        *,
        at: Sequence[str] | None = None,
        split: Cost = "params",
        num_stages: int | None = None,
        sample: Any = None,
        **options: Unpack[PipelineOptions],
    ) -> Pipeline:
        """A pipeline of a Sequential, cut between its children.

        Args:
            model: The whole model, on every rank.
            group: The pipeline's ranks, as in `Pipeline`.
            at: Children that begin a new stage. None: stages are balanced.
            split: By what: "params", their number; "time", as the first rank measures it; or a function that gives the
                cost of one child.
            num_stages: None: one a rank, or two where the schedule has several.
            sample: For "time": inputs of the model, such as one microbatch.
            **options: As in `Pipeline`.

        Raises:
            UsageError: the model is no Sequential, or cannot be cut so.
        """
        if at is None:
            own = resolve(group)
            schedule = PipelineSchedule.of(options.get("schedule", PipelineSchedule.ONE_F_ONE_B))
            wanted = num_stages or default_num_stages(schedule, own.size())
            at = balanced_starts(model, split, wanted, sample=sample, group=own)
        elif num_stages not in (None, len(at) + 1):
            raise UsageError(f"at={list(at)} makes {len(at) + 1} stages, and num_stages={num_stages}: leave one away.")
        return cls(sections(model, at), group, **options)

    def step(self, x: Any = None, target: Any = None, loss: Loss | None = None) -> torch.Tensor | None:
        """Forward and backward of one batch; gradients are added to those that are there. Every rank calls it.

        Args:
            x: Input of the model, samples along dim 0; a tuple holds several arguments. The rank with the first stage
                needs it, the others may leave it away.
            target: What the loss compares with, a tensor with samples along dim 0; the rank with the last stage needs
                it.
            loss: Mean loss of one microbatch; None: the pipeline's own.

        Returns:
            On the rank with the last stage the loss of each microbatch, shape (num_microbatches,), without gradient;
            its mean is that of the batch. None on the others.

        Raises:
            UsageError: the batch cannot be cut into microbatches, or something is missing; on all ranks.
        """
        self._step_loss = (loss,) if loss is not None else self._loss
        args = as_args(x) if self.is_first and x is not None else ()
        own = (described(args), self._traits())
        self._agree(x, target, training=True, changed=self._runner is None or own != self._made_for)
        if self._runner is None:
            self._runner, self._made_for = self._make_runner(), own
        self._losses.clear()
        try:
            self._runner.step(args, target if self.is_last else None)
        except BaseException:
            self._runner = None  # what torch keeps of half a step would be taken for the next one's
            raise
        return torch.stack(self._losses[-self.num_microbatches :]) if self.is_last else None

    def forward(self, *args: Any) -> Any:
        """The model's output, without gradients; every rank calls it.

        Args:
            *args: Inputs of the model, needed on the rank with the first stage.

        Returns:
            On the rank with the last stage the output for the whole batch; None on the others.

        Raises:
            UsageError: the batch cannot be cut into microbatches; on all ranks.
        """
        self._agree(args or None, None, training=False, changed=False)
        run = ForwardPass(
            self._computing, num_stages=self.num_stages, rank_of=self._rank_of, group=self._group, spans=self._spans
        )
        inputs = microbatches(args, self.num_microbatches) if self.is_first else []
        outputs = run.run(inputs, self.num_microbatches)
        return merged(outputs) if self.is_last else None

    def mean_loss(self, losses: torch.Tensor | None) -> float:
        """The mean of what `step` returned, on every rank; collective."""
        device = next(iter(self._devices.values()))
        mean = torch.zeros((), dtype=torch.float64, device=device)
        if losses is not None:
            mean.copy_(losses.mean())
        return float(broadcast(mean, src=self.last_rank, group=self._group))

    def memory_estimate(self) -> PipelineMemoryStats:
        """How many microbatches are live at once, by the schedule."""
        return PipelineMemoryStats.of(
            self.schedule,
            num_ranks=self._group.size(),
            num_stages=self.num_stages,
            num_microbatches=self.num_microbatches,
        )

    def peak_activations(self) -> dict[int, int]:
        """Most microbatches that were live in each of this rank's stages in the last step; empty without spans."""
        watches = {} if self._runner is None else self._runner.watches
        return {stage: watch.peak for stage, watch in watches.items()}

    def _agree(self, x: Any, target: Any, *, training: bool, changed: bool) -> None:
        """Go on together, or not at all; and have torch's pipeline made anew where that is so on any rank."""
        problem = refused("x", x, self.num_microbatches, several=True) if self.is_first else None
        if training and self.is_last and problem is None:
            problem = refused("target", target, self.num_microbatches)
            if self._step_loss == (None,):
                problem = "there is no loss: pipe.step(x, target, loss), or Pipeline(…, loss=loss)"
        if training and not torch.is_grad_enabled():
            problem = "step() trains, and gradients are off here: pipe(x) is the forward without them"
        rows = [rows_of(x) if self.is_first else 0, rows_of(target) if training and self.is_last else 0]
        everyone = agree(self._group, problem, int(changed), *rows)
        inputs, targets = everyone[0][1], everyone[self.last_rank][2]
        if training and inputs != targets:
            raise UsageError(f"x has {inputs} samples and target {targets}: each sample has its target.")
        if any(row[0] for row in everyone):
            self._runner = None

    def _traits(self) -> tuple[Any, ...]:
        """What decides, besides the batch, over shapes and dtypes between stages, and over what needs a gradient."""
        kinds = {device.type for device in self._devices.values()}
        casts = tuple((kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in kinds)
        return casts, tuple((parameter.requires_grad, parameter.dtype) for parameter in self.parameters())

    def _make_runner(self) -> Runner:
        return Runner(
            self._computing,
            schedule=self.schedule,
            num_stages=self.num_stages,
            num_microbatches=self.num_microbatches,
            group=self._group,
            devices=self._devices,
            loss=self._loss_of,
            spans=self._spans,
        )

    def _loss_of(self, output: Any, target: Any) -> torch.Tensor:
        (loss_of,) = self._step_loss
        assert loss_of is not None
        loss = loss_of(output, target)
        self._losses.append(loss.detach())
        return loss / self.num_microbatches

    def extra_repr(self) -> str:
        """What `repr` shows beside the modules."""
        own = ", ".join(map(str, self.stage_indices))
        return f"stages {own} of {self.num_stages}, {self.schedule.value}, {self.num_microbatches} microbatches"
