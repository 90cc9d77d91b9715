"""`plan.calibrate`: measures the links and the speed of running ranks.

Check runs then compare what it predicts with measurements that it was not fitted to.
"""

from __future__ import annotations

import base64
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import cloudpickle
import torch
import torch.distributed as dist
from torch.optim import Optimizer

from axon_nb.comm.group import Backend, resolve
from axon_nb.errors import UsageError
from axon_nb.plan.arguments import SINGLE_AXIS_STRATEGIES, check_choice, check_int, check_number
from axon_nb.plan.calibration import benchmarks
from axon_nb.plan.calibration.result import Calibration, Check, Sample
from axon_nb.plan.errors import PlanError
from axon_nb.plan.hardware import Link, Rates, Work
from axon_nb.plan.muon import is_muon
from axon_nb.plan.tracing.subject import ModelSource, resolve_optimizer
from axon_nb.plan.tracing.trace import trace_model
from axon_nb.records.protocol.inspection import Calibrate
from axon_nb.records.protocol.wire import Expression, cell_source

SIZES = (1 << 12, 1 << 16, 1 << 20, 1 << 22, 1 << 24)
"""Bytes of the whole tensors that are sent."""
_SHAPES = {"cpu": (384, 160, 448), "cuda": (5120, 1536, 3072)}
"""Rows, inner size and columns of a product that is not square."""
_ELEMENTS = {"cpu": 3 << 18, "cuda": 3 << 24}
_LEAST_SIZES = 3
"""A line through fewer points predicts nothing about another one."""


def calibrate(
    mesh: Any = None,
    *,
    cluster: Any = None,
    model: Any = None,
    inputs: Any = None,
    target: Any = None,
    loss: Callable[..., torch.Tensor] | None = None,
    optimizer: Callable[..., Optimizer] | str | None = "AdamW",
    strategies: Sequence[Any] | str = ("ddp", "full_shard"),
    batch: int = 1,
    seq: int | None = None,
    operations: Sequence[str] = benchmarks.MEASURED_OPERATIONS,
    sizes: Sequence[int] = SIZES,
    repeats: int = 5,
    budget_s: float = 5.0,
    dtype: torch.dtype = torch.float32,
) -> Calibration:
    """Measure each axis's link and the ranks' compute rates. Every rank must call it; it takes a few seconds.

    In a `%%distributed` cell, under torchrun, or wherever there is a default group:

        here = plan.calibrate(make_mesh(dp=2, tp=2))
        plan.step_time(make, 64, inputs=make_batch, rates=here, links=here)

    In the notebook, ``plan.calibrate(cluster=axon_nb.current_cluster())`` runs it on the ranks.

    Args:
        mesh: Its axes are measured; None: one axis ``all`` with all ranks. With `cluster`, the name of a mesh there.
        cluster: Run on this cluster's ranks, from the notebook.
        model: A model to fit the rates to, by phase, in the forms of `plan.step_time`. None: rates of plain matrix
            products and elementwise operations.
        inputs: The model's inputs.
        target: What its loss takes besides the output.
        loss: Function of output and target, or of the output alone; None: the sum of the output.
        optimizer: A function that makes it from parameters, or its name in `torch.optim`; its step is
            measured too. None: no optimizer step.
        strategies: For a model: ``ddp`` or values of `ShardingStrategy` whose wrappers are measured around it; ignored
            on a mesh of several axes.
        batch: Samples per rank, for a GPTConfig and for described inputs.
        seq: Tokens in a sample, for the same.
        operations: Collectives to measure.
        sizes: Bytes of whole tensors.
        repeats: Number of timings; the median counts. Fewer are made of what takes long: a measurement that has lasted
            3 s is not repeated again.
        budget_s: Seconds per axis after which no larger tensor is measured.
        dtype: Compute dtype.

    Raises:
        UsageError: there is no default group, or an option is invalid.
    """
    _check(operations, sizes, repeats, budget_s, dtype)
    names = [strategies] if isinstance(strategies, str) else strategies
    kinds = [check_choice("strategies", str(getattr(name, "value", name)), SINGLE_AXIS_STRATEGIES) for name in names]
    if is_muon(make := resolve_optimizer(optimizer)):
        raise PlanError("optimizer='Muon' cannot be calibrated: calibrate with 'AdamW', and plan with 'Muon'.")
    options: dict[str, Any] = {
        "source": None if model is None else ModelSource(model, inputs, target, loss, batch, seq),
        "optimizer": make,
        "strategies": tuple(kinds),
        "operations": tuple(operations),
        "sizes": tuple(sizes),
        "repeats": repeats,
        "budget_s": budget_s,
        "dtype": dtype,
    }
    if cluster is not None:
        return _run_on(cluster, mesh, options)
    return calibrate_on_rank(mesh, **options)


def _check(operations: Any, sizes: Any, repeats: Any, budget_s: Any, dtype: Any) -> None:
    for name, value, rule in (
        ("operations", operations, f"one or more of {', '.join(benchmarks.MEASURED_OPERATIONS)}"),
        ("sizes", sizes, "one or more sizes in bytes"),
    ):
        if not isinstance(value, Iterable) or isinstance(value, str) or not list(value):
            raise UsageError(f"{name} must be {rule}; got {value!r}.")
    for operation in operations:
        check_choice("operations", operation, benchmarks.MEASURED_OPERATIONS)
    for size in sizes:
        check_int("sizes", size, what="bytes")
    check_int("repeats", repeats)
    check_number("budget_s", budget_s, rule="seconds, 0 or more")
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise UsageError(f"dtype must be a floating-point dtype, such as torch.float32; got {dtype!r}.")


def _run_on(cluster: Any, mesh: Any, options: dict[str, Any]) -> Calibration:
    """Run it on a cluster's ranks and return rank 0's result, which equals all others'."""
    if mesh is not None and not (isinstance(mesh, str) and mesh.isidentifier()):
        raise UsageError(f"With cluster=, mesh must be the name of a mesh on the ranks, such as 'mesh'; got {mesh!r}.")
    if not hasattr(cluster, "run"):
        raise UsageError(f"cluster must be a Cluster, such as axon_nb.current_cluster(); got {cluster!r}.")
    sent = base64.b85encode(cloudpickle.dumps(options)).decode()
    call = Calibrate(mesh=None if mesh is None else Expression(mesh), sent=sent)
    answer = cluster.run(cell_source(call), quiet=True)
    calibration: Calibration = answer.values[min(answer.values)]
    return calibration


def calibrate_on_rank(mesh: Any = None, *, sent: str = "", **options: Any) -> Calibration:
    """Run `calibrate` on a rank.

    Args:
        mesh: The same as in `calibrate`.
        sent: The options, as the notebook sends them.
        **options: The options of `calibrate`, with the model and its inputs as `source`.

    Raises:
        UsageError: there is no default group.
    """
    if sent:
        options = cloudpickle.loads(base64.b85decode(sent))
    if not dist.is_initialized():
        raise UsageError(
            "No process group to measure: call it in a `%%distributed` cell, under torchrun after World.init(), or "
            "with cluster=axon_nb.current_cluster()."
        )
    world = resolve(None)
    on_gpu = world.backend is Backend.NCCL
    device = torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")
    everyone = benchmarks.AxisBenchmark("all", dist.group.WORLD, device)
    repeats = options["repeats"]
    rates = benchmarks.measure_rates(everyone, repeats=repeats, dtype=options["dtype"])
    count = torch.get_num_threads()
    threads = f", {count} thread{'s' * (count != 1)}" if device.type == "cpu" else ""
    where = f"{world.size()} ranks, {world.backend.value}, {device.type}{threads}"
    samples: list[Sample] = []
    links: dict[str, Link] = {}
    for bench in _benches(mesh, everyone):
        if bench.num_ranks < 2:
            continue
        bench_samples = bench.measure(
            options["operations"],
            options["sizes"],
            repeats=repeats,
            budget_s=options["budget_s"],
            agree=everyone.slowest,
        )
        samples += bench_samples
        links[bench.axis] = benchmarks.fit_link(bench.axis, bench_samples, where)
    overlap = benchmarks.measure_overlap(everyone, repeats=repeats) if world.size() > 1 else 0.0
    if world.size() > 1:
        with torch.enable_grad(), torch.random.fork_rng():
            rates = replace(rates, wrappers={"dtensor": benchmarks.measure_dtensor(everyone, repeats=repeats)})
    checks = check_rates(everyone, rates, repeats=repeats, dtype=options["dtype"])
    for axis in links:
        checks += tuple(check_collectives([sample for sample in samples if sample.axis == axis]))
    plain = Calibration(links, rates, overlap, where, tuple(samples), checks)
    return plain if options["source"] is None else _fit_to_model(plain, everyone, options)


def _fit_to_model(plain: Calibration, everyone: benchmarks.AxisBenchmark, options: dict[str, Any]) -> Calibration:
    """Fit the rates to a model, and measure its wrappers."""
    source, optimizer, repeats = options["source"], options["optimizer"], options["repeats"]
    with torch.enable_grad(), torch.random.fork_rng():
        trace = trace_model(source, optimizer=optimizer)
        if not trace.has_inputs:
            raise UsageError("inputs= is required to measure a model: one batch.")
        rates, alone_s = benchmarks.measure_phases(everyone, plain.rates, source, trace, optimizer, repeats=repeats)
        if len(plain.links) == 1 and plain.samples[0].num_ranks == everyone.num_ranks:
            wrappers = benchmarks.measure_wrappers(
                everyone,
                source,
                trace,
                optimizer,
                strategies=options["strategies"],
                rates=rates,
                link=next(iter(plain.links.values())),
                overlap=plain.overlap,
                alone_s=alone_s,
                repeats=repeats,
            )
            rates = replace(rates, wrappers={**rates.wrappers, **wrappers})
    return replace(plain, rates=rates)


def _benches(mesh: Any, everyone: benchmarks.AxisBenchmark) -> list[benchmarks.AxisBenchmark]:
    if mesh is None:
        return [everyone]
    names = getattr(mesh, "mesh_dim_names", None)
    if not names:
        raise UsageError(f"mesh must have named axes, as make_mesh(dp=2, tp=2) gives it; got {mesh!r}.")
    return [benchmarks.AxisBenchmark(name, mesh.get_group(name), everyone.device) for name in names]


def check_rates(
    bench: benchmarks.AxisBenchmark, rates: Rates, *, repeats: int, dtype: torch.dtype
) -> tuple[Check, ...]:
    """Measure a matrix product and an elementwise operation of other shapes than the rates were fitted to.

    Args:
        bench: Benchmark of the ranks that compute.
        rates: The rates to check.
        repeats: Number of timings; the median counts.
        dtype: The dtype of the tensors.
    """
    kind = bench.device.type if bench.device.type in _SHAPES else "cpu"
    rows, inner, columns = _SHAPES[kind]
    a, b = (torch.ones(shape, device=bench.device, dtype=dtype) for shape in ((rows, inner), (inner, columns)))
    x = torch.ones(_ELEMENTS[kind], device=bench.device, dtype=dtype)
    runs = {
        f"matrix product of {rows} x {inner} x {columns}": (
            Work(2.0 * rows * inner * columns, 0.0, 1),
            functools.partial(torch.matmul, a, b),
        ),
        f"elementwise operation on {x.numel():,} elements": (
            Work(0.0, 3.0 * x.nbytes, 1),
            functools.partial(torch.add, x, x.clone()),
        ),
    }
    return tuple(
        Check(name, benchmarks.seconds_of(bench, call, repeats), rates.seconds(work, ""))
        for name, (work, call) in runs.items()
    )


def check_collectives(samples: Sequence[Sample]) -> Iterator[Check]:
    """Yield each measured size of each collective with what the other sizes predict for it; the ends are left out.

    Args:
        samples: Samples of one axis.
    """
    for operation in dict.fromkeys(sample.operation for sample in samples):
        measured = sorted((sample for sample in samples if sample.operation == operation), key=lambda one: one.bytes)
        for number in range(1, len(measured) - 1) if len(measured) >= _LEAST_SIZES else ():
            one = measured[number]
            link = benchmarks.fit_link(one.axis, [other for other in measured if other is not one], "")
            predicted = link.seconds(operation, one.bytes, one.num_ranks)
            yield Check(f"{operation} of {one.bytes:,} bytes along {one.axis}", one.seconds, predicted)
