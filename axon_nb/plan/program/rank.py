"""Runs a program as ranks of a world without other ranks, on tensors without data, each in a fork of this process.

A fake rank finds variables of torchrun, streams with a virtual clock, and DDP's reduction. Programs are written for
CUDA and NCCL, or for Gloo. There is no device: moves to CUDA are ignored, and `torch.cuda`'s streams and events only
note who waits for whom. FSDP2 takes its streams from `torch.cpu`.

A fake rank hears nothing. Rank 0 runs first and has the first stage of a pipeline, so it knows the inputs: it finds all
tensors between stages by passing one microbatch through copies of them, unrecorded. The other ranks get what it found.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import gc
import logging
import os
import pickle
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from importlib import import_module
from types import TracebackType
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from msgspec import Struct
from torch import nn
from torch._subclasses import fake_tensor
from torch.distributed import device_mesh, pipelining
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from axon_nb.comm.collectives.direct import all_gather_single
from axon_nb.comm.group import ProcessGroup
from axon_nb.errors import UsageError
from axon_nb.parallel.pipeline.pipeline import Pipeline
from axon_nb.parallel.pipeline.stages import HeldStages, agree, as_args
from axon_nb.plan.errors import PlanError
from axon_nb.plan.footprint.fake_world import GLOO_COPIES, NO_VALUES, fake_tensors, fake_world
from axon_nb.plan.hardware import Rates
from axon_nb.plan.process import Report, fork_map
from axon_nb.plan.program.record import Boundary, Lane, PipelineStep, RankRecord, TensorFact, distinct_ranks, merged
from axon_nb.plan.program.recorder import ProgramLog, Recording, stream_names
from axon_nb.plan.tracing.fake_tensors import WithoutCuda, is_cuda, replaced, without_tracebacks
from axon_nb.records.hooks import missing_hooks
from axon_nb.records.stacks import library_of
from axon_nb.torch_api import torch_api

_NO_SHAPES = "PipeliningMetadataError"
_Swap = Callable[[Any, str, Any], None]


def simulate(task: Mapping[str, Any], report: Report) -> list[Lane]:
    """Run the ranks of a task.

    Args:
        task: The fields of `Program`, its function and arguments pickled; and ``ranks``, already checked.
        report: Called with the fraction done and the next step.

    Raises:
        PlanError: the program failed.
    """
    if missing := missing_hooks("plan.program"):
        raise PlanError(f"plan.run needs {', '.join(missing)}, which torch {torch.__version__} lacks: use plan.memory.")
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # the program's: nobody reads them here
    logging.disable(logging.WARNING)
    options = dict(task)
    pickled, wanted, size = options.pop("function"), options.pop("ranks"), options["world_size"]
    recording = Recording()
    with on_fake_rank(recording, min(size, options["ranks_per_host"]), is_gpu=options["is_gpu"]):
        report(0.05, "importing the program")
        function, args = pickle.loads(pickled)
        program = Program(function, args, **options)
        gc.freeze()
        known: dict[int, RankRecord] = {}

        def run(ranks: Sequence[int]) -> Mapping[int, RankRecord]:
            if 0 not in known:  # the others need what its pipelines say
                known[0] = fork_map([partial(run_rank, program, recording, 0)])[0]
                recording.pipeline_steps = known[0].pipeline_steps
            todo = sorted(set(ranks) - known.keys())
            report(0.1 + 0.8 * len(known) / (len(known) + len(todo) + 1), f"running {len(todo)} of {size} ranks")
            records = fork_map([partial(run_rank, program, recording, rank) for rank in todo])
            known.update(zip(todo, records, strict=True))
            return known

        if wanted == "distinct":
            return distinct_ranks(size, run)
        if wanted == "all":
            return merged(run(range(size)))
        records = run(wanted)
        rest = tuple(rank for rank in range(size) if rank not in wanted)
        lanes = merged({rank: records[rank] for rank in wanted})
        return [Lane(lanes[0].record, (*lanes[0].ranks, *rest)), *lanes[1:]]


class Program(Struct, frozen=True):
    """What to run."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    world_size: int
    is_gpu: bool
    """Whether ranks are GPUs; False: CPU ranks with Gloo."""
    ranks_per_host: int
    rates: Rates | None
    memory: float | None
    """Bytes of memory per rank; None: unlimited."""
    item: float | None
    """What tensors answer when their value is read; None: reading raises."""


class _OnDevice(WithoutCuda):
    """Moves to CUDA are ignored, except from the meta device: there, memory is allocated."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if is_cuda(kwargs.get("device")) and args and isinstance(args[0], torch.Tensor) and args[0].is_meta:
            kwargs["device"] = "cpu"
        return super().__torch_function__(func, types, args, kwargs)


def run_rank(program: Program, recording: Recording, rank: int) -> RankRecord:
    """Run the program as one rank.

    Args:
        program: The program.
        recording: The recording of `on_fake_rank`, inside of which this is called.
        rank: The rank in its world.

    Raises:
        PlanError: it failed, or needs a value; the message names the line.
    """
    size = program.world_size
    copying = None if program.is_gpu else GLOO_COPIES
    log = ProgramLog(program.rates, copying, program.item, rank=rank, pipeline_steps=recording.pipeline_steps)
    set_variables(rank, size, program.ranks_per_host)
    with (
        fake_world(rank, size),
        without_tracebacks(),
        fake_tensors(),
        log,
        _OnDevice(),
    ):
        recording.log = log
        try:
            held = program.function(*program.args)  # what it returns stays allocated until the end
        except Exception as error:
            raise PlanError(_explained(error, rank)) from error
        finally:
            recording.log = None
        record = log.finish(program.memory)
        del held
    return record


def _explained(error: BaseException, rank: int) -> str:
    place = _place_of(error.__traceback__)
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, NO_VALUES):
            return (
                f"{place} reads a tensor's value ({_question(cause)}), but a plan's tensors have none: give item=, the "
                "number that .item() answers, or leave the line out of the plan."
            )
        if type(cause).__name__ == _NO_SHAPES:
            return (
                f"{place}: a PipelineStage does not know its shapes, which a plan's ranks cannot exchange: give it "
                "input_args= and output_args=."
            )
        cause = cause.__cause__ or cause.__context__
    if isinstance(error, UsageError):
        return f"{place}, rank {rank}: {error}"
    return f"{place} failed on rank {rank}: {type(error).__name__}: {error}"


def _question(error: BaseException) -> str:
    name = str(error.args[0]) if error.args else type(error).__name__
    return ".item()" if "_local_scalar_dense" in name else name.removesuffix(".default")


def _place_of(trace: TracebackType | None) -> str:
    frames = [frame for frame in traceback.extract_tb(trace) if not library_of(frame.filename)]
    return f"Line {frames[-1].lineno} of {frames[-1].filename}" if frames else "The program"


def set_variables(rank: int, size: int, ranks_per_host: int) -> None:
    """Set the environment variables that torchrun sets.

    Args:
        rank: The rank in the world.
        size: The size of the world.
        ranks_per_host: The number of ranks per host, for the local rank.
    """
    local = min(size, ranks_per_host)
    os.environ |= {
        "RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_RANK": str(rank % local), "LOCAL_WORLD_SIZE": str(local),
        "MASTER_ADDR": "localhost", "MASTER_PORT": "29500",
    }  # fmt: skip


@contextlib.contextmanager
def on_fake_rank(recording: Recording, num_devices: int, *, is_gpu: bool) -> Iterator[None]:
    """Inside, programs that are unpickled find what they would find on a rank.

    Args:
        recording: Where their waits are recorded.
        num_devices: Ranks per host.
        is_gpu: Whether collectives run beside the program, as on GPUs.
    """
    with contextlib.ExitStack() as stack:

        def swap(owner: Any, name: str, value: Any) -> None:
            stack.callback(setattr, owner, name, getattr(owner, name))
            setattr(owner, name, value)

        def swap_everywhere(function: Any, value: Any) -> None:
            name = function.__name__
            for module in list(sys.modules.values()):
                if vars(module).get(name) is function:
                    swap(module, name, value)

        for function in (dist.init_process_group, dist.destroy_process_group):
            swap_everywhere(function, _unless_running(recording, function))
        swap_everywhere(device_mesh.init_device_mesh, functools.partial(_named_mesh, device_mesh.init_device_mesh))
        swap_everywhere(torch.compile, _uncompiled)
        for function, answer in _OBJECT_COLLECTIVES.items():
            swap_everywhere(function, answer)
        _patch_distributed(swap, recording)
        PipelineAnswers(recording).install(swap, swap_everywhere)
        _patch_devices(swap, recording, num_devices, is_gpu=is_gpu)
        stack.enter_context(torch_api().static_stages())
        hooks = [register_optimizer_step_post_hook(lambda optimizer, *_: recording.current.end_step(optimizer))]
        if is_gpu:
            hooks.append(register_optimizer_step_pre_hook(lambda optimizer, *_: _use_foreach(optimizer)))
        for hook in hooks:
            stack.callback(hook.remove)
        yield


def _patch_distributed(swap: Any, recording: Recording) -> None:
    handle = import_module("torch._C._distributed_c10d").FakeWork
    wait = handle.wait

    def waited(self: Any, *args: Any) -> Any:
        recording.current.wait(self)
        return wait(self, *args)

    swap(handle, "wait", waited)
    ddp = import_module("torch.nn.parallel.distributed")
    swap(ddp, "_verify_param_shape_across_processes", lambda *_, **__: None)  # it reads the other ranks' values
    swap(vars(dist)["Reducer"], "_rebuild_buckets", lambda _: False)  # it reads the order in which rank 0 was ready
    swap(DistributedDataParallel, "__init__", _ddp_init(DistributedDataParallel.__init__, recording))


def _named_mesh(make: Any, device_type: str, *args: Any, **kwargs: Any) -> DeviceMesh:
    with fake_tensor.unset_fake_temporarily():  # a mesh holds rank numbers
        mesh: DeviceMesh = make("cpu", *args, **kwargs)
        return mesh


def _mesh_of_groups(make: Any, group: Any, *args: Any, **kwargs: Any) -> DeviceMesh:
    return _named_mesh(partial(make, group), *args, **kwargs)


def _all_gather_object(everyone: list[Any], obj: Any, group: Any = None) -> None:
    everyone[:] = [obj] * dist.get_world_size(group)


def _gather_object(obj: Any, everyone: list[Any] | None = None, *_: Any, group: Any = None, **__: Any) -> None:
    if everyone is not None:
        _all_gather_object(everyone, obj, group)


def _scatter_object_list(output: list[Any], parts: list[Any] | None, *_: Any, group: Any = None, **__: Any) -> None:
    output[0] = None if parts is None else parts[dist.get_rank(group)]


_OBJECT_COLLECTIVES: dict[Any, Any] = {
    dist.all_gather_object: _all_gather_object,
    dist.broadcast_object_list: lambda *_, **__: None,
    dist.gather_object: _gather_object,
    dist.scatter_object_list: _scatter_object_list,
}
"""Objects cannot be exchanged: other ranks are taken to have the same."""


def _unless_running(recording: Recording, function: Any) -> Any:
    """Have a function do nothing while a program runs: its world exists already, and outlives it."""

    @functools.wraps(function)
    def called(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs) if recording.log is None else None

    return called


def _ddp_init(init: Any, recording: Recording) -> Any:
    @functools.wraps(init)
    def made(self: Any, *args: Any, **kwargs: Any) -> None:
        kwargs = {key: value for key, value in kwargs.items() if key not in ("device_ids", "output_device")}
        init(self, *args[:1], **kwargs)
        group = self.process_group

        def reduce(_: Any, bucket: Any) -> torch.futures.Future[torch.Tensor]:
            buffer = bucket.buffer()
            buffer.div_(group.size())
            recording.current.wrap("ddp", len(bucket.parameters()))
            recording.current.wait_after_backward(dist.all_reduce(buffer, group=group, async_op=True))
            future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
            future.set_result(buffer)
            return future

        reduce.__annotations__.clear()  # DDP compares them
        # The fake group's all-reduce does not return what DDP expects.
        self.register_comm_hook(None, reduce)

    return made


def _patch_devices(swap: Any, recording: Recording, num_devices: int, *, is_gpu: bool) -> None:
    make_mesh = DeviceMesh.__init__

    def mesh(self: DeviceMesh, device_type: str, *args: Any, **kwargs: Any) -> None:
        make_mesh(self, "cpu", *args, **kwargs)

    swap(DeviceMesh, "__init__", mesh)
    swap(DeviceMesh, "from_group", staticmethod(functools.partial(_mesh_of_groups, DeviceMesh.from_group)))
    for name, value in (
        ("set_device", lambda *_: None),
        ("current_device", lambda: 0),
        ("device_count", lambda: num_devices),
        ("synchronize", lambda *_: recording.current.synchronize()),
        ("empty_cache", lambda: None),
        ("get_rng_state", lambda *_: None),
        ("set_rng_state", lambda *_: None),
        ("manual_seed", lambda *_: None),
        ("manual_seed_all", lambda *_: None),
    ):
        swap(torch.cuda, name, value)
    streams = stream_names(recording)
    for module in (torch.cuda, torch.cpu) if is_gpu else (torch.cuda,):
        for name, value in streams.items() if module is torch.cuda else list(streams.items())[:-1]:
            swap(module, name, value)


def _uncompiled(model: Any = None, **_: Any) -> Any:
    return model if model is not None else lambda function: function


def _use_foreach(optimizer: Any) -> None:
    """Use the kernels for many tensors, as torch does on GPUs."""
    for group in optimizer.param_groups:
        if group.get("foreach", False) is None and not group.get("fused"):
            group["foreach"] = True


class PipelineAnswers:
    """Answers what our pipelines ask other ranks.

    Args:
        recording: Of the running rank.
    """

    def __init__(self, recording: Recording) -> None:
        self._recording = recording
        self._stages: WeakKeyDictionary[nn.Module, list[Any]] = WeakKeyDictionary()
        """All stages of a pipeline, before any is wrapped."""
        self._boundaries: tuple[Boundary, ...] | None = None
        """Of the pipeline whose step runs."""

    def install(self, swap: _Swap, swap_everywhere: Callable[[Any, Any], None]) -> None:
        """Replace what asks other ranks.

        Args:
            swap: Sets an attribute until the plan ends.
            swap_everywhere: Replaces a function under its name in all modules.
        """
        hold, step, make = HeldStages.__init__, Pipeline.step, Pipeline._make_runner

        def held(pipe: Any, stages: Sequence[Any], *args: Any, **kwargs: Any) -> None:
            with self._recording.current.paused():
                kept = [
                    copy.deepcopy(stage.module) if isinstance(stage.module, nn.Module) else stage.module
                    for stage in stages
                ]
            hold(pipe, stages, *args, **kwargs)
            self._stages[pipe] = kept

        def stepped(pipe: Any, x: Any = None, target: Any = None, loss: Any = None) -> Any:
            self._boundaries = self._found(pipe, x)
            return step(pipe, x, target, loss)

        def made(pipe: Any) -> Any:
            with replaced(pipelining, "PipelineStage", self._stage_maker(pipelining.PipelineStage)):
                return make(pipe)

        swap(HeldStages, "__init__", held)
        swap(Pipeline, "step", stepped)
        swap(Pipeline, "_make_runner", made)
        swap_everywhere(agree, self._agree)

    def _found(self, pipe: Any, x: Any) -> tuple[Boundary, ...] | None:
        """The tensors of one microbatch between stages, those of the model's input first."""
        log = self._recording.current
        if log.rank:
            return log.pipeline_step.boundaries
        if not (pipe.is_first and isinstance(as_args(x)[0], torch.Tensor)):
            return None
        value = tuple(arg[: max(1, len(arg) // pipe.num_microbatches)] for arg in as_args(x))
        found = [tuple(map(_fact, value))]
        dtype = _output_dtype(pipe)
        with log.paused(), torch.enable_grad():
            for stage in self._stages[pipe]:
                output = (stage if isinstance(stage, nn.Module) else stage())(*value)
                parts = tuple(output) if isinstance(output, (tuple, list)) else (output,)
                value = tuple(one.to(dtype) if dtype and one.is_floating_point() else one for one in parts)
                found.append(tuple(map(_fact, value)))
        return tuple(found)

    def _stage_maker(self, plain: Any) -> Callable[..., Any]:
        def stage(module: nn.Module, index: int, *args: Any, **kwargs: Any) -> Any:
            if self._boundaries is not None:
                given, made = (tuple(map(_meta, facts)) for facts in self._boundaries[index : index + 2])
                kwargs |= {"input_args": given, "output_args": made}
            return plain(module, index, *args, **kwargs)

        return stage

    def _agree(self, group: ProcessGroup, problem: str | None, *numbers: int) -> list[list[int]]:
        """As `agree`, with the other ranks' numbers as far as they matter: all have equally many samples."""
        if problem is not None:
            raise UsageError(f"{problem} (on rank {group.ranks[group.rank()]}).")
        own = torch.empty(1 + len(numbers), dtype=torch.int64)
        all_gather_single(own.new_empty(group.size() * len(own)), own, group=group.torch_group)
        log = self._recording.current
        changed, *rows = numbers
        if log.rank:
            changed = int(bool(changed) or log.pipeline_step.is_changed)
        log.end_agreement(PipelineStep(bool(changed), self._boundaries))
        return [[changed, *(count or max(rows, default=0) for count in rows)]] * group.size()


def _output_dtype(pipe: Pipeline) -> torch.dtype | None:
    """The dtype of what stages return, if FSDP changes it."""
    for module in pipe.modules():
        if isinstance(module, FSDPModule):
            policy: Any = module._get_fsdp_state()._mp_policy
            found: torch.dtype | None = policy.output_dtype or policy.param_dtype
            return found
    return None


def _fact(tensor: torch.Tensor) -> TensorFact:
    return tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."), tensor.requires_grad


def _meta(fact: TensorFact) -> torch.Tensor:
    shape, dtype, requires_grad = fact
    return torch.empty(shape, dtype=getattr(torch, dtype), device="meta", requires_grad=requires_grad)
