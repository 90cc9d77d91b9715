"""The order in which the site documents the public names, and how it reads their docstrings.

`tests/docs/test_site.py` finds names that have no place here.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from importlib import import_module
from types import ModuleType

API: dict[str, tuple[str, dict[str, tuple[str, ...]]]] = {
    "axon_nb": (
        "Clusters and training loops: what `import axon_nb` has.",
        {
            "Clusters": ("start", "attach", "current_cluster", "on_resize", "Cluster", "CellResult"),
            "In a training loop": ("log", "progress", "calls"),
            "Errors": (
                "AxonError",
                "UsageError",
                "NoClusterError",
                "StartError",
                "ClusterLostError",
                "CellError",
                "CellTimeoutError",
                "CellInterrupt",
            ),
            "The extension and its views": ("load_ipython_extension", "unload_ipython_extension", "show"),
        },
    ),
    "axon_nb.show": ("The live views as functions.", {"Views": ("watch", "timeline", "shards", "memory", "inside")}),
    "axon_nb.comm": (
        "Collectives on torch tensors, NumPy and CuPy arrays; `from axon_nb.prelude import *` imports all of it.",
        {
            "Worlds and groups": ("World", "ProcessGroup", "Backend", "Handle", "checking"),
            "Reduce": (
                "all_reduce",
                "all_reduce_sum",
                "all_reduce_mean",
                "all_reduce_min",
                "all_reduce_max",
                "all_reduce_product",
                "reduce_scatter",
                "reduce_scatter_sum",
                "reduce_scatter_mean",
                "ReduceOp",
            ),
            "Copy": (
                "broadcast",
                "broadcast_from",
                "all_gather",
                "gather_tensor",
                "scatter_tensor",
                "all_to_all",
                "send",
                "recv",
                "barrier",
            ),
            "Gradients": (
                "sync_gradient",
                "sync_gradients",
                "GradientSynchronizer",
                "GradSyncStrategy",
                "GradientBucket",
            ),
            "Mock worlds": ("MockWorld", "MockBackend"),
            "Errors": (
                "CommError",
                "InvalidArgumentError",
                "InvalidRankError",
                "TensorError",
                "TensorMismatchError",
                "NotInGroupError",
                "WorldClosedError",
                "CollectiveMismatchError",
                "DeadlockError",
                "NcclError",
            ),
        },
    ),
    "axon_nb.parallel": (
        "Data, sharded, tensor and pipeline parallelism, and checkpoints; `axon_nb.prelude` imports all of it.",
        {
            "Data parallelism": (
                "DDP",
                "DistributedDataParallel",
                "accumulating",
                "SyncBatchNorm",
                "ResumableSampler",
                "reduce_metrics",
            ),
            "Compression": ("CommHook", "HookStats", "FP16", "BF16", "PowerSGD", "TopK", "Hierarchical"),
            "Sharded models": (
                "FSDP",
                "FullyShardedDataParallel",
                "ShardingStrategy",
                "CPUOffload",
                "FSDPMemoryStats",
                "ZeRO1",
                "OptimizerKind",
            ),
            "Tensor parallelism": (
                "parallelize",
                "ColumnParallelLinear",
                "RowParallelLinear",
                "ParallelMLP",
                "TensorParallelAttention",
                "TensorParallelBlock",
                "parallel_cross_entropy",
            ),
            "Long contexts and experts": ("ContextParallel", "Experts", "expert_load", "ExpertLoad"),
            "Pipelines": (
                "Pipeline",
                "PipelineSchedule",
                "PipelineStage",
                "PipelineMemoryStats",
                "bubble_fraction",
                "ideal_timeline",
            ),
            "Meshes and three dimensions": (
                "Parallel3D",
                "make_mesh",
                "axis_group",
                "coordinates",
                "declare_placements",
                "model_states",
            ),
            "Steps": ("Muon", "clip_grad_norm", "grad_norm", "NonFiniteNormError", "checkpoint_blocks"),
            "Checkpoints": ("Checkpoints", "Resumed", "load_checkpoint", "save_on_main", "export_safetensors"),
        },
    ),
    "axon_nb.inside": (
        "Record and change inputs and outputs of modules, whole, in models that are split over ranks.",
        {"Look": ("record", "Recording", "lens"), "Change": ("replace", "add")},
    ),
    "axon_nb.plan": (
        "Predict memory, communication and time before you have ranks: `from axon_nb import plan`.",
        {
            "Questions": (
                "memory",
                "schedule",
                "communication",
                "recorded_communication",
                "step_time",
                "search",
                "run",
                "capture",
                "calibrate",
            ),
            "Answers": (
                "MemoryPlan",
                "MemoryParts",
                "ModuleMemory",
                "RankMemory",
                "SchedulePlan",
                "StageTimes",
                "CommunicationPlan",
                "StepTime",
                "SearchPlan",
                "ProgramPlan",
                "CapturedModel",
                "Calibration",
            ),
            "Hardware and models": ("GPUS", "PRESETS", "Rates", "Link", "TensorSpec"),
            "Errors": ("PlanError", "PlanCancelledError", "SimulatorError"),
        },
    ),
    "axon_nb.compat.horovod": (
        "Horovod's API for PyTorch on axon_nb's groups: see [what there is](../../horovod.md).",
        {
            "Start": ("init", "shutdown", "is_initialized", "size", "rank", "local_size", "local_rank"),
            "Collectives": ("allreduce", "allgather", "alltoall", "broadcast", "join", "Average", "Sum"),
            "Training": (
                "DistributedOptimizer",
                "broadcast_parameters",
                "broadcast_optimizer_state",
                "broadcast_object",
                "Compression",
                "Compressor",
                "HorovodInternalError",
            ),
        },
    ),
    "axon_nb.testing": ("Tests of distributed code on warm ranks, with pytest.", {"Fixtures": ("ranks", "Ranks")}),
}
"""By module, what it is for and its names by subject."""

_ENTRY = """\
```{{eval-rst}}
.. currentmodule:: {module}
{directives}
```
"""


def api_page(name: str) -> str:
    """Return the page of a module, in MyST."""
    summary, subjects = API[name]
    module = import_module(name)
    parts = [f"# `{name}`\n", f"{summary}\n"]
    for subject, names in subjects.items():
        directives = "\n".join(_directive(each, getattr(module, each)) for each in names)
        parts += [f"## {subject}\n", _ENTRY.format(module=name, directives=directives)]
    return "\n".join(parts)


def _directive(name: str, value: object) -> str:
    if isinstance(value, type):
        kind = "autoexception" if issubclass(value, BaseException) else "autoclass"
        return f".. {kind}:: {name}\n   :members:\n   :no-inherited-members:\n"
    if isinstance(value, ModuleType):
        return f".. py:data:: {name}\n\n   The module :doc:`{value.__name__}`.\n"
    if callable(value):
        return f".. autofunction:: {name}\n"
    text = f"By name: {', '.join(f'``{key}``' for key in value)}." if isinstance(value, Mapping) else f"``{value!r}``"
    return f".. py:data:: {name}\n\n   {text}\n"


_CODE = re.compile(r"(?<!`)`([^`]+)`(?!`)(\w?)")


def to_rst(lines: list[str]) -> None:
    """Make reStructuredText of a docstring in place: code in backticks, and indented paragraphs, which are examples."""
    text = "\n".join(lines).replace("|", "\\|")
    text = _CODE.sub(lambda code: f"``{' '.join(code[1].split())}``" + (f"\\ {code[2]}" if code[2] else ""), text)
    text = re.sub(r"``[^`]+``", lambda code: code[0].replace("\\|", "|"), text)
    lines[:] = []
    before = ["", ""]
    for line in text.split("\n"):
        starts_example = line.startswith("    ") and not before[-1].strip() and not before[-2].startswith(" ")
        if starts_example and before[-2]:
            lines += ["::", ""]
        lines.append(line)
        before = [before[-1], line]
