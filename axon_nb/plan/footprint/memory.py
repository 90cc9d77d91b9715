"""`plan.memory`: will it fit?"""

from __future__ import annotations

import hashlib
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Unpack

import cloudpickle

from axon_nb.plan import arguments
from axon_nb.plan.errors import PlanError
from axon_nb.plan.footprint.plan import MemoryPlan, MemoryRequest, parse_ranks
from axon_nb.plan.models import dtype_name, sendable_model
from axon_nb.plan.process import Report, run_in_process

_CACHE_SIZE = 64
_cache: OrderedDict[str, MemoryPlan] = OrderedDict()
_METHODS = ("simulate", "closed_form")
_NAMED = ("world_size", "optimizer", "optimizer_options", "dtype", "cpu_offload", "activation_checkpointing")


def memory(
    model: Any,
    world_size: int | None = None,
    *,
    optimizer: Any = "AdamW",
    optimizer_options: Mapping[str, Any] | None = None,
    dtype: Any = None,
    cpu_offload: Any = "none",
    activation_checkpointing: Any = None,
    keep_whole: bool = False,
    ranks: str | int | Sequence[int] = "worst",
    fragmentation: float | None = None,
    method: str = "simulate",
    extrapolate: bool = True,
    progress: Callable[[float, str], None] | None = None,
    cancel: threading.Event | None = None,
    refresh: bool = False,
    cluster: Any = None,
    **layout: Unpack[arguments.LayoutOptions],
) -> MemoryPlan:
    """Predict how much memory a training step takes on each rank, without the ranks and without the memory.

    By default a separate process runs one rank's step on tensors without data and tracks every storage. Ctrl-C and
    `cancel` stop it. Models with many blocks, or groups of blocks, that are proven alike run at two small depths; the
    rest is extrapolated. Where nothing is proven, all blocks are simulated. Answers are cached.

        plan.memory(GPTConfig(hidden=4096, heads=32, blocks=34, context=2048), 64, mixed_precision="bfloat16")
        plan.memory("model", 64, inputs=plan.TensorSpec(("batch", 1024)), batch=8)  # the ranks' variable `model`

    Args:
        model: A function without arguments that makes the model; an `axon_nb.parallel.models.GPTConfig`; a module, of
            which only classes and shapes are used; the name of one on the ranks, planned as it was before wrapping; the
            result of `plan.capture`; or a causal language model of Hugging Face: its config, the path of its
            config.json or of the folder, or its name such as ``"meta-llama/Llama-3.1-70B"``. Weights are never read.
        world_size: Number of ranks; None: the mesh says.
        optimizer: Its name in `torch.optim`, its class, or a function that makes one from parameters.
        optimizer_options: Its keyword arguments.
        dtype: The dtype of parameters, such as ``"bfloat16"``; None: as the model makes them.
        cpu_offload: A `CPUOffload`, or its value.
        activation_checkpointing: Blocks to recompute in backward: their class or its name, a function of a module that
            returns a bool, or True for the model's equal blocks.
        keep_whole: As in `FSDP`, with ``shard_grad_op``.
        ranks: ``worst``, ``all``, or rank numbers.
        fragmentation: Allowance for fragmentation, as a fraction of everything else; None: 0.05 on cuda, 0 on cpu.
        method: ``simulate``, or ``closed_form``: model states only, immediately, in this process.
        extrapolate: False: simulate every block.
        progress: Called with the fraction done, 0 to 1, and the next step.
        cancel: Set it to cancel the plan.
        refresh: Simulate even if the answer is cached.
        cluster: The cluster on which `model` is a name; None: the one that this notebook's cells run on.
        **layout: The fields of `LayoutOptions`: mesh, strategy, inputs, target, loss, batch, seq, mixed_precision,
            wrap, tp_plan, schedule, num_microbatches, device. A mesh with the axis tp alone wraps nothing around the
            model. `device` decides whether optimizers use their foreach kernels and whether offloaded tensors leave the
            device.

    Raises:
        PlanError: the model cannot be built or run on tensors without data, or an option is invalid; the message says
            what works.
        SimulatorError: the simulator process failed.
        PlanCancelledError: `cancel` was set.
        NoClusterError: the model is a name, and no ranks run.
    """
    arguments.check_choice("method", method, _METHODS)
    arguments.check_callbacks(progress, cancel)
    arguments.check_options(layout, tuple(arguments.LayoutOptions.__annotations__), named=_NAMED)
    options: dict[str, Any] = {**layout}
    strategy = arguments.choice_value(options.pop("strategy", "full_shard")).lower()
    mesh = arguments.resolve_mesh(world_size, options.pop("mesh", None), strategy)
    mixed = options.pop("mixed_precision", None)
    device = options.setdefault("device", "cuda")
    request = MemoryRequest(
        sendable_model(model, cluster),
        mesh,
        strategy,
        optimizer=optimizer,
        optimizer_options=optimizer_options,
        dtype=None if dtype is None else dtype_name(dtype, "dtype"),
        mixed_precision=None if mixed is None else dtype_name(mixed, "mixed_precision"),
        cpu_offload=arguments.choice_value(cpu_offload),
        activation_checkpointing=activation_checkpointing,
        keep_whole=keep_whole,
        schedule=arguments.choice_value(options.pop("schedule", "1F1B")),
        ranks=parse_ranks(ranks),
        fragmentation=(0.05 if device == "cuda" else 0.0) if fragmentation is None else fragmentation,
        extrapolate=extrapolate,
        simulate=method == "simulate",
        **options,
    ).check()
    start = time.monotonic()
    if not request.simulate:
        from axon_nb.plan.footprint.question import closed_form_plan

        return replace(closed_form_plan(request), seconds=time.monotonic() - start)
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
    made = run_in_process(_simulate, task, progress=progress, cancel=cancel)
    made = replace(made, seconds=time.monotonic() - start)
    _cache[key] = made
    while len(_cache) > _CACHE_SIZE:
        _cache.popitem(last=False)
    return made


def _simulate(request: MemoryRequest, report: Report) -> MemoryPlan:
    """Simulate a request, in the process that may import torch."""
    from axon_nb.plan.footprint.simulate import simulate

    return simulate(request, report)


def _pickled(request: MemoryRequest) -> bytes:
    try:
        task: bytes = cloudpickle.dumps(request)
    except Exception as error:
        raise PlanError(
            f"The model, its inputs or its loss cannot be sent to another process ({error}): give functions that make "
            "what they need instead of capturing open objects."
        ) from error
    return task
