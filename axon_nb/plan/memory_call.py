"""`plan.memory`: will it fit?"""

from __future__ import annotations

import hashlib
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import cloudpickle

from axon_nb.plan.asked_numbers import check_watchers
from axon_nb.plan.capture_named import sendable
from axon_nb.plan.errors import PlanError
from axon_nb.plan.memory_record import MemoryPlan
from axon_nb.plan.memory_request import MemoryRequest, some_ranks
from axon_nb.plan.mesh_axes import one_of, resolved_mesh
from axon_nb.plan.models import dtype_name
from axon_nb.plan.worker import run_apart

__all__ = ["memory"]

_KEPT = 64
_cache: OrderedDict[str, MemoryPlan] = OrderedDict()
_METHODS = ("simulate", "closed_form")


def memory(
    model: Any,
    world: int | None = None,
    *,
    mesh: Any = None,
    strategy: Any = "full_shard",
    inputs: Any = None,
    target: Any = None,
    loss: Any = None,
    optimizer: Any = "adam",
    optimizer_options: Mapping[str, Any] | None = None,
    dtype: Any = None,
    mixed_precision: Any = None,
    offload: Any = "none",
    batch: int = 1,
    seq: int | None = None,
    checkpointing: Any = None,
    wrap: Any = None,
    tp_plan: Any = "auto",
    microbatches: int | None = None,
    schedule: Any = "1F1B",
    device: str = "cuda",
    ranks: str | int | Sequence[int] = "worst",
    fragmentation: float | None = None,
    method: str = "simulate",
    extrapolate: bool = True,
    progress: Callable[[float, str], None] | None = None,
    cancel: threading.Event | None = None,
    refresh: bool = False,
    cluster: Any = None,
) -> MemoryPlan:
    """What a training step of a model takes of each rank's memory, without the ranks and without the memory.

    By default one rank of the world runs a step on tensors without data, in a process of its own, and each storage is
    counted while it lives. Ctrl-C and `cancel` end it. Of models with many equal blocks two short versions run, and
    the rest is extrapolated. The same question is answered from memory.

        plan.memory(GPTConfig(hidden=4096, heads=32, blocks=34, context=2048), world=64, mixed_precision="bfloat16")
        plan.memory("model", world=64, inputs=plan.TensorSpec(("batch", 1024)), batch=8)  # the ranks' variable `model`

    Args:
        model: A function without arguments that makes it; `axon_nb.parallel.models.GPTConfig`; a module, of which
            only classes and sizes are taken; the name of one on the ranks, as it was before it was wrapped; or what
            `plan.capture` has made of one.
        world: Number of ranks; None: as the mesh has.
        mesh: Size of each axis: ``dp``; ``replicate`` and ``shard`` for hybrid_shard; ``tp`` cuts layers, ``pp``
            stages. tp alone: with nothing wrapped around. On ranks a `DeviceMesh` with such axes will do. None: one
            axis, dp.
        strategy: One of `ShardingStrategy` or its value, or ``ddp``.
        inputs: What the model is called with: a `TensorSpec`, a tuple of them, or a function that makes tensors. Not
            needed with GPTConfig, nor a `GPT`.
        target: What the loss is given besides the output, in the same forms.
        loss: From output and target, or from the output alone, to a scalar; None: the output's mean.
        optimizer: Its name in `torch.optim`, its class, or what makes one from parameters.
        optimizer_options: Its keyword arguments.
        dtype: Of parameters, such as ``"bfloat16"``; None: as the model has them.
        mixed_precision: dtype of parameters in forward and backward (FSDP), or of autocast (ddp, optimizer_state).
        offload: A `CPUOffload`, or its value.
        batch: Samples of a rank's batch.
        seq: Tokens of a sample; None: the context of a GPTConfig.
        checkpointing: Blocks that are computed again in backward: their class or its name, a function that is asked
            about each module, or True: the model's equal blocks.
        wrap: FSDP's units, as in `axon_nb.parallel.FSDP`; a class may be given by its name.
        tp_plan: With an axis tp: what `axon_nb.parallel.parallelize` takes.
        microbatches: With an axis pp: parts of a rank's batch; None: one a stage.
        schedule: With an axis pp: a `PipelineSchedule`, or its name.
        device: What ranks compute on, ``cuda`` or ``cpu``: it decides which optimizers work on many tensors at once,
            and whether the host's memory is another one.
        ranks: ``worst``, ``all``, or numbers.
        fragmentation: Allowance, as a share of all else; None: 0.05 on cuda, 0 on cpu.
        method: ``simulate``, or ``closed_form``: model states only, at once, in this process.
        extrapolate: False: simulate every block.
        progress: Called with the share done, 0 to 1, and what is done next.
        cancel: When it is set, the plan is called off.
        refresh: Simulate again, even when the answer is known.
        cluster: Whose ranks have the model of that name; None: the one that this notebook's cells run on.

    Raises:
        PlanError: the model cannot be built or run on tensors without data, ranks cannot be arranged so, or an option
            has no meaning; the message says what can.
        SimulatorError: the simulator's process failed.
        Cancelled: `cancel` was set.
        NoClusterError: the model is a name, and no ranks run.
    """
    one_of("method", method, _METHODS)
    check_watchers(progress, cancel)
    chosen = _value(strategy).lower()
    axes = resolved_mesh(world, mesh, chosen)
    request = MemoryRequest(
        sendable(model, cluster),
        axes,
        chosen,
        inputs=inputs,
        target=target,
        loss=loss,
        optimizer=optimizer,
        optimizer_options=optimizer_options,
        dtype=None if dtype is None else dtype_name(dtype, "dtype"),
        mixed_precision=None if mixed_precision is None else dtype_name(mixed_precision, "mixed_precision"),
        offload=_value(offload),
        batch=batch,
        seq=seq,
        checkpointing=checkpointing,
        wrap=wrap,
        tp_plan=tp_plan,
        microbatches=microbatches,
        schedule=_value(schedule),
        device=device,
        ranks=some_ranks(ranks),
        fragmentation=(0.05 if device == "cuda" else 0.0) if fragmentation is None else fragmentation,
        extrapolate=extrapolate,
        simulate=method == "simulate",
    ).check()
    start = time.monotonic()
    if not request.simulate:
        from axon_nb.plan.memory_states import by_formula

        return replace(by_formula(request), seconds=time.monotonic() - start)
    return _simulated(request, start, progress, cancel, refresh)


def _simulated(
    request: MemoryRequest,
    start: float,
    progress: Callable[[float, str], None] | None,
    cancel: threading.Event | None,
    refresh: bool,
) -> MemoryPlan:
    task = _pickled(request)
    key = hashlib.sha256(task).hexdigest()
    if not refresh and key in _cache:
        _cache.move_to_end(key)
        return _cache[key]
    made: MemoryPlan = run_apart("axon_nb.plan.simulate:simulate", task, progress=progress, cancel=cancel)
    made = replace(made, seconds=time.monotonic() - start)
    _cache[key] = made
    while len(_cache) > _KEPT:
        _cache.popitem(last=False)
    return made


def _pickled(request: MemoryRequest) -> bytes:
    try:
        task: bytes = cloudpickle.dumps(request)
    except Exception as error:
        raise PlanError(
            f"the model, its inputs or its loss cannot be sent to another process ({error}): give functions that make "
            "what they need, rather than use what is open here."
        ) from error
    return task


def _value(given: Any) -> str:
    """A choice by its name: enumerations of `axon_nb.parallel` have it as their value."""
    return str(getattr(given, "value", given))
