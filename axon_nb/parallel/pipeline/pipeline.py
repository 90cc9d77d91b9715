"""Pipeline parallelism: a model split into stages on different ranks, and a batch split into microbatches.

Training steps run with torch's schedule, for batches of one shape. A forward pass without gradients runs all
microbatches through the stages; its shapes may change from call to call.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypedDict, Unpack

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from axon_nb.comm.collectives.movement import barrier, broadcast, recv, send
from axon_nb.comm.group import GroupLike, resolve
from axon_nb.comm.spans import Moment, device_clock, now
from axon_nb.errors import UsageError
from axon_nb.parallel.loop import describe_other_device
from axon_nb.parallel.pipeline.schedule import (
    PipelineMemoryStats,
    PipelineSchedule,
    StageWatch,
    check_counts,
    default_num_stages,
    is_prepared,
    quiet,
    schedule_class,
)
from axon_nb.parallel.pipeline.stages import (
    Cost,
    HeldStages,
    PipelineStage,
    agree,
    balanced_stage_starts,
    check_no_shared_parameters,
    describe_args,
    find_problem_of_split,
    join_microbatches,
    microbatches_of,
    split_sections,
)
from axon_nb.records.hooks import missing_hooks
from axon_nb.records.spans import Span, suppress_spans
from axon_nb.torch_api import torch_api

Loss = Callable[[Any, Any], torch.Tensor]
"""Computes the mean loss of one microbatch from its output and target."""


class PipelineOptions(TypedDict, total=False):
    """Keyword arguments of `Pipeline`."""

    num_microbatches: int | None
    schedule: PipelineSchedule | str
    loss: Loss | None
    device: torch.device | str | None
    wrap: Callable[[nn.Module], nn.Module] | None
    spans: bool


class Pipeline(HeldStages):
    """Holds one or several stages of the model on each rank; microbatches flow through them.

    `step(x, target)` trains: afterwards the gradients are those of one process for the mean loss over the batch.
    `pipe(x)` runs a forward without gradients. Parameters keep their names in the whole model; `module` holds this
    rank's part of it.

    Args:
        stages: All stages in order: modules, or `PipelineStage`s. Only this rank's are kept.
        group: A World, one of our groups or torch's, or a mesh with one axis; None means all ranks.
        num_microbatches: Microbatches per batch; None: as many as stages.
        schedule: Order of computation: a `PipelineSchedule`, or its name.
        loss: Mean loss of one microbatch, from output and target; None: pass it to `step`.
        device: Device of stages that specify none; None: where their parameters are.
        wrap: Called with each of this rank's stages; returns the module that computes, such as the stage in DDP.
        spans: Record a span for every action, with stage and microbatch.

    Raises:
        UsageError: the numbers of ranks, stages and microbatches do not fit the schedule, or two stages share a
            parameter.
        NotInGroupError: this rank is not a member of the group.
    """

    def __init__(
        self,
        stages: Sequence[nn.Module | PipelineStage],
        *,
        group: GroupLike | Any = None,
        num_microbatches: int | None = None,
        schedule: PipelineSchedule | str = PipelineSchedule.ONE_F_ONE_B,
        loss: Loss | None = None,
        device: torch.device | str | None = None,
        wrap: Callable[[nn.Module], nn.Module] | None = None,
        spans: bool = True,
    ) -> None:
        parts = [stage if isinstance(stage, PipelineStage) else PipelineStage(stage) for stage in stages]
        resolved, kind = resolve(group), PipelineSchedule.of(schedule)
        count = len(parts) if num_microbatches is None else num_microbatches
        check_counts(kind, num_ranks=resolved.size(), num_stages=len(parts), num_microbatches=count)
        check_no_shared_parameters(parts)
        super().__init__(parts, resolved, kind, device=device, wrap=wrap)
        self.num_microbatches = count
        self._loss = (loss,)  # in a tuple, so that a loss that is a module does not become a submodule
        self._step_loss: tuple[Loss | None] = (None,)
        self._losses: list[torch.Tensor] = []
        self._spans = spans
        self._runner: Runner | None = None
        self._runner_key: tuple[Any, ...] = ()

    @classmethod
    def from_modules(
        cls, modules: Sequence[nn.Module], *, group: GroupLike | Any = None, **options: Unpack[PipelineOptions]
    ) -> Pipeline:
        """Create a pipeline of these stages, named "0", "1", …, as in `nn.Sequential(*modules)`."""
        return cls(modules, group=group, **options)

    @classmethod
    def split(
        cls,
        model: nn.Module,
        *,
        group: GroupLike | Any = None,
        at: Sequence[str] | None = None,
        split: Cost = "params",
        num_stages: int | None = None,
        sample: Any = None,
        **options: Unpack[PipelineOptions],
    ) -> Pipeline:
        """Create a pipeline from a Sequential, split between its children.

        Args:
            model: The whole model, on every rank.
            group: The pipeline's ranks, as in `Pipeline`.
            at: Names of the children that start a new stage. None: balance the stages.
            split: What to balance: "params", the number of parameters; "time", as measured on the first rank; or a
                function that returns the cost of one child.
            num_stages: Number of stages. None: one per rank, or two if the schedule needs several.
            sample: Inputs of the model for "time", such as one microbatch.
            **options: The same as in `Pipeline`.

        Raises:
            UsageError: the model is not a Sequential, or cannot be split like that.
        """
        if at is None:
            resolved = resolve(group)
            schedule = PipelineSchedule.of(options.get("schedule", PipelineSchedule.ONE_F_ONE_B))
            wanted = num_stages or default_num_stages(schedule, resolved.size())
            at = balanced_stage_starts(model, split, wanted, sample=sample, group=resolved)
        elif num_stages not in (None, len(at) + 1):
            raise UsageError(f"at={list(at)} defines {len(at) + 1} stages, but num_stages={num_stages}; pass only one.")
        return cls(split_sections(model, at), group=group, **options)

    def step(
        self,
        x: Any = None,
        target: Any = None,
        loss: Loss | None = None,
        *,
        arg_mbs: list[Any] | None = None,
        kwarg_mbs: list[dict[str, Any]] | None = None,
        target_mbs: list[torch.Tensor] | None = None,
    ) -> torch.Tensor | None:
        """Run forward and backward of one batch and accumulate gradients. Call it on every rank.

        Args:
            x: Input of the model, samples along dim 0; a tuple holds several arguments. Required on the rank with the
                first stage, ignored elsewhere.
            target: Target for the loss, a tensor with samples along dim 0. Required on the rank with the last stage.
            loss: Mean loss of one microbatch; None: the pipeline's own.
            arg_mbs: Instead of `x`, the input of each microbatch, all of the same shapes.
            kwarg_mbs: Keyword arguments of each microbatch, such as masks, for each stage of this rank.
            target_mbs: Instead of `target`, that of each microbatch.

        Returns:
            On the rank with the last stage, the loss of each microbatch, shape (num_microbatches,), without gradient;
            its mean is the loss of the batch. None elsewhere.

        Raises:
            UsageError: the batch cannot be split into microbatches, or something is missing; raised on all ranks.
        """
        self._step_loss = (loss,) if loss is not None else self._loss
        inputs: list[Any] = []
        targets: list[Any] = []
        problem: str | None = None
        if self.is_first:
            inputs, problem = microbatches_of("x", x, self.num_microbatches, "arg_mbs", arg_mbs, several=True)
        if self.is_last and problem is None:
            targets, problem = microbatches_of("target", target, self.num_microbatches, "target_mbs", target_mbs)
        if kwarg_mbs is not None:
            problem = problem or find_problem_of_split("kwarg_mbs", kwarg_mbs, self.num_microbatches)
        key = (*map(describe_args, inputs[:1]), self._shape_context())
        changed = self._runner is None or key != self._runner_key
        self._check_batch(inputs, targets, problem, training=True, changed=changed)
        if self._runner is None:
            self._runner, self._runner_key = self._make_runner(), key
        self._losses.clear()
        try:
            self._runner.step(inputs or None, kwarg_mbs, [part for (part,) in targets] or None)
        except BaseException:
            self._runner = None  # torch would mix what it keeps of half a step with the next one
            raise
        barrier(group=self._group)  # otherwise late stages step their optimizer before an early stage fails
        return torch.stack(self._losses[-self.num_microbatches :]) if self.is_last else None

    def forward(self, *args: Any) -> Any:
        """Compute the model's output without gradients. Call it on every rank.

        Args:
            *args: Inputs of the model, required on the rank with the first stage.

        Returns:
            On the rank with the last stage, the output for the whole batch; None elsewhere.

        Raises:
            UsageError: the batch cannot be split into microbatches; raised on all ranks.
        """
        inputs: list[Any] = []
        problem: str | None = None
        if self.is_first:
            inputs, problem = microbatches_of("x", args or None, self.num_microbatches, several=True)
        self._check_batch(inputs, [], problem, training=False, changed=False)
        outputs = ForwardPass(self).run(inputs)
        return join_microbatches(outputs) if self.is_last else None

    @property
    def infers_shapes(self) -> bool:
        """Whether the next forward of a stage is discarded, because it only infers shapes."""
        return self._runner is not None and bool(self._runner.unshaped)

    def mean_loss(self, losses: torch.Tensor | None) -> float:
        """Average the losses that `step` returned; the same on every rank. Collective."""
        device = next(iter(self.devices.values()))
        mean = torch.zeros((), dtype=torch.float64, device=device)
        if losses is not None:
            mean.copy_(losses.mean())
        return float(broadcast(mean, src=self.last_rank, group=self._group))

    def memory_estimate(self) -> PipelineMemoryStats:
        """Estimate how many microbatches are live at once, from the schedule."""
        return PipelineMemoryStats.of(
            self.schedule,
            num_ranks=self._group.size(),
            num_stages=self.num_stages,
            num_microbatches=self.num_microbatches,
        )

    def peak_activations(self) -> dict[int, int]:
        """Return the peak of live microbatches per stage of this rank in the last step; empty without spans."""
        watches = {} if self._runner is None else self._runner.watches
        return {stage: watch.peak for stage, watch in watches.items()}

    def _check_batch(
        self, inputs: list[Any], targets: list[Any], problem: str | None, *, training: bool, changed: bool
    ) -> None:
        """Continue on all ranks or on none, and rebuild torch's pipeline if any rank needs it."""
        if self.is_first:
            problem = problem or self._misplaced("inputs", 0, inputs)
        if training and self.is_last and problem is None:
            problem = self._misplaced("targets", self.num_stages - 1, targets)
            if self._step_loss == (None,):
                problem = "no loss given: use pipe.step(x, target, loss) or Pipeline(…, loss=loss)"
        if training and not torch.is_grad_enabled():
            problem = "step() needs gradients, which are disabled here; for inference use pipe(x)"
        rows = (sum(len(part[0]) for part in parts) for parts in (inputs, targets))
        everyone = agree(self._group, problem, int(changed), *rows)
        given, wanted = everyone[0][1], everyone[self.last_rank][2]
        if training and given != wanted:
            raise UsageError(f"x and target must have equally many samples; got {given} and {wanted}.")
        if any(row[0] for row in everyone):
            self._runner = None

    def _misplaced(self, name: str, stage: int, value: Any) -> str | None:
        device = self.devices[stage]
        return describe_other_device(name, device.type, lambda: device, value) or None

    def _shape_context(self) -> tuple[Any, ...]:
        """Return what else determines shapes and dtypes between stages, and which parameters need gradients."""
        kinds = {device.type for device in self.devices.values()}
        casts = tuple((kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in kinds)
        return casts, tuple((parameter.requires_grad, parameter.dtype) for parameter in self.parameters())

    def _make_runner(self) -> Runner:
        return Runner(self)

    def _loss_of(self, output: Any, target: Any) -> torch.Tensor:
        (loss_of,) = self._step_loss
        assert loss_of is not None
        loss = loss_of(output, target)
        self._losses.append(loss.detach())
        return loss / self.num_microbatches

    def extra_repr(self) -> str:
        """Describe stages and schedule in `repr`."""
        indices = ", ".join(map(str, self.stage_indices))
        return f"stages {indices} of {self.num_stages}, {self.schedule.value}, {self.num_microbatches} microbatches"


class Runner:
    """Wraps torch's stages and schedule of a pipeline, and cleans up after torch's shape inference."""

    def __init__(self, pipe: Pipeline) -> None:
        from torch.distributed.pipelining import PipelineStage as TorchStage

        group, kind = pipe.group, pipe.schedule
        torch_group = group.torch_group
        stages = [
            TorchStage(module, index, pipe.num_stages, pipe.devices[index], group=torch_group)
            for index, module in sorted(pipe._stage_modules.items())
        ]
        for stage in stages:
            torch_api().prepare_stage(stage)
        self._modules = list(pipe._stage_modules.values())
        self._has_run = False
        self.unshaped: list[nn.Module] = []
        """Stages whose next forward only infers shapes."""
        self.watches: dict[int, StageWatch] = {}
        """By stage; empty if nothing is recorded."""
        if pipe._spans and not missing_hooks("parallel.pipeline_spans"):
            rank, name = group.ranks[group.rank()], torch_group.group_name
            alone = not kind.has_many_stages
            self.watches = {
                stage.stage_index: StageWatch(stage, rank=rank, group=name, is_alone=alone) for stage in stages
            }
        # The loss is divided instead of the gradients, which may include those of earlier steps.
        held = stages if kind.has_many_stages else stages[0]
        self._schedule = schedule_class(kind)(held, pipe.num_microbatches, loss_fn=pipe._loss_of, scale_grads=False)
        self._schedule.restores_buffers = True  # see `_preserve_state`; on ranks, schedules of others get a hint

    def step(self, args: list[Any] | None, kwargs: list[Any] | None, targets: list[Any] | None) -> None:
        """Run forward and backward of one batch.

        Args:
            args: Arguments of the first stage for each microbatch; None on ranks without it.
            kwargs: Keyword arguments of this rank's stages for each microbatch; None: none.
            targets: Targets of the last stage for each microbatch; None on ranks without it.
        """
        # torch 2.11 gives a stage strides that a slice of a larger tensor does not have, and then refuses them.
        args = args and [tuple(arg.contiguous() for arg in part) for part in args]
        start = now()
        for watch in self.watches.values():
            watch.begin_step(start)
        prepared = is_prepared(self._schedule, self._has_run)
        with quiet(), contextlib.nullcontext() if prepared else _preserve_state(self._modules, self.unshaped):
            try:
                torch_api().run_schedule(self._schedule, arg_mbs=args, kwarg_mbs=kwargs, target_mbs=targets)
            except RuntimeError as error:
                if (cause := _stage_exception(error)) is None:
                    raise
                raise cause from None
        self._has_run = True


def _stage_exception(error: RuntimeError) -> BaseException | None:
    """Return the exception raised by a stage's own code: torch prefixes its message with all arguments."""
    text = str(error).lower()
    return error.__cause__ if "failed to run forward" in text or "failed to run stage" in text else None


@contextlib.contextmanager
def _preserve_state(modules: list[nn.Module], unshaped: list[nn.Module]) -> Iterator[None]:
    """Restore buffers and gradients after a step in which torch first runs one microbatch to infer shapes.

    Otherwise BatchNorm would count that microbatch twice, DDP would take the first backward for the last one and
    average too early, and torch would drop all gradients of FSDP2 modules (2.13).
    """
    unshaped[:] = modules
    restores = [_restore_after_forward(module, unshaped) for module in modules]
    parameters = [parameter for module in modules for parameter in module.parameters()]
    saved = [(parameter, parameter.grad) for parameter in parameters if parameter.grad is not None]
    for parameter, _ in saved:
        parameter.grad = None
    try:
        yield
    finally:
        for restore in restores:
            restore()
        with torch.no_grad():
            for parameter, grad in saved:
                parameter.grad = grad if parameter.grad is None else parameter.grad.add_(grad)


def _restore_after_forward(module: nn.Module, unshaped: list[nn.Module]) -> Callable[[], None]:
    """Restore buffers after the next forward, and disable DDP's averaging during it.

    Returns:
        A function that does so now, unless already done.
    """
    saved = [(buffer, buffer.detach().clone()) for buffer in module.buffers()]
    ddp: Any = module if isinstance(module, DistributedDataParallel) and module.require_backward_grad_sync else None
    if ddp is not None:
        ddp.require_backward_grad_sync = False

    def restore(*_: Any) -> None:
        nonlocal saved
        handle.remove()
        unshaped[:] = [other for other in unshaped if other is not module]
        for buffer, before in saved:
            buffer.data.copy_(before)  # through data: autograd has recorded the buffers of this discarded forward
        saved = []
        if ddp is not None:
            ddp.require_backward_grad_sync = True

    handle = module.register_forward_hook(restore)
    return restore


class ForwardPass:
    """Runs the stages of a pipeline's rank one after the other, each over all microbatches.

    torch's schedules are not used: they would negotiate shapes again whenever training and inference alternate, and
    would divide gradients that wait for an optimizer step.
    """

    def __init__(self, pipe: Pipeline) -> None:
        self._pipe = pipe
        self._modules, self._group = pipe._stage_modules, pipe.group
        self._sent: list[tuple[Any, Any]] = []
        self._local_inputs: dict[int, list[tuple[Any, ...]]] = {}
        self._start_ns = 0

    @torch.no_grad()
    def run(self, inputs: Sequence[tuple[Any, ...]]) -> list[Any]:
        """Return the output of each microbatch on the rank with the last stage; elsewhere an empty list.

        Args:
            inputs: The arguments of each microbatch; empty on ranks without the first stage.
        """
        outputs: list[Any] = []
        self._start_ns = now()
        for stage in sorted(self._modules):
            deferred: list[tuple[int, Any]] = []
            for microbatch in range(self._pipe.num_microbatches):
                args = inputs[microbatch] if stage == 0 else self._inputs(stage, microbatch)
                start = device_clock.moment(self._pipe.devices[stage])
                with suppress_spans("forward"):
                    output = self._modules[stage](*args)
                self._record("F", start, (stage, microbatch))
                if stage == self._pipe.num_stages - 1:
                    outputs.append(output)
                elif self._must_defer_sends(stage):
                    deferred.append((microbatch, output))
                else:
                    self._send_output(stage, microbatch, output)
            for microbatch, output in deferred:
                self._send_output(stage, microbatch, output)
        for handle, _ in self._sent:
            handle.wait()
        self._reshard()
        return outputs

    def _must_defer_sends(self, stage: int) -> bool:
        # When two ranks send to each other at once, NCCL processes all messages in order, one at a time.
        sender, receiver = self._pipe._rank_of(stage), self._pipe._rank_of(stage + 1)
        return self._group.size() == 2 and receiver < sender

    def _inputs(self, stage: int, microbatch: int) -> tuple[Any, ...]:
        if stage - 1 in self._modules:
            return self._local_inputs[stage].pop(0)
        source = self._pipe._rank_of(stage - 1)
        start = Moment(now())
        with suppress_spans("wait"):
            count = int(recv(source, group=self._group))
            args = tuple(recv(source, group=self._group) for _ in range(count))
        self._record("RECV_F", start, (stage, microbatch), sum(arg.nbytes for arg in args))
        return args

    def _send_output(self, stage: int, microbatch: int, output: Any) -> None:
        parts = tuple(output) if isinstance(output, (tuple, list)) else (output,)
        if stage + 1 in self._modules:
            self._local_inputs.setdefault(stage + 1, []).append(parts)
            return
        start = Moment(now())
        device = parts[0].device
        for tensor in (torch.tensor(len(parts), device=device), *parts):
            handle = send(tensor, self._pipe._rank_of(stage + 1), group=self._group, async_op=True)
            self._sent.append((handle, tensor))
        self._record("SEND_F", start, (stage, microbatch), sum(part.nbytes for part in parts))

    def _record(self, name: str, since: Moment, position: tuple[int, int], size: int = 0) -> None:
        if self._pipe._spans:
            kind, group = "forward" if name == "F" else "p2p", self._group
            rank, group_name = group.ranks[group.rank()], group.torch_group.group_name
            span = Span(rank, kind, name, since.ns, now(), group_name, size, *position, self._start_ns)
            device_clock.emit(span, since)

    def _reshard(self) -> None:
        # An FSDP2 root keeps parameters unsharded for backward. There is none here, and an optimizer step may be next.
        for module in self._modules.values():
            for part in module.modules():
                if isinstance(part, FSDPModule):
                    part.reshard()
