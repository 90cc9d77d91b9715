"""What libraries do on valid input and nobody expects: the right result where that is free, else one sentence.

Nothing here runs, or is imported, before one of the modules in `SURPRISES` is: then its function here, or in
`sharded_tensors`, wraps what meets the surprise, and nothing else. A sentence appears once in each cell.

Scripts that show each of them without axon_nb are in the folder ``findings`` of the project's sources.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import itertools
import linecache
import math
import os
import re
import sys
import warnings
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._pytree import tree_leaves

from axon_nb.compat import sharded_tensors
from axon_nb.compat.environment import SURPRISES
from axon_nb.compat.hints import after, before, tell
from axon_nb.records.hooks import missing_hooks

_FIRST_STATE: Mapping[str, float] = {"step": 0.0, "mu_product": 1.0, "exp_inf": 0.0}
"""States that a step without gradients changes, and their values before the first step."""


def prepare(module: ModuleType) -> None:
    """Prepare a module that was just imported, as `SURPRISES` says."""
    entry = SURPRISES[module.__name__]
    if isinstance(entry, str):
        (vars(sharded_tensors).get(entry) or globals()[entry])(module)
        return
    when, place, look = entry
    *owners, name = place.split(".")
    (before if when == "before" else after)(functools.reduce(getattr, owners, module), name, globals()[look])


# ---- torch.distributed.checkpoint


def prepare_state_dicts(module: ModuleType) -> None:
    """Take back torch's own step of an optimizer without state, and compare parameter groups."""
    for name in ("set_optimizer_state_dict", "set_state_dict"):
        before(module, name, _check_groups)
    if missing_hooks("surprises.state_dict"):
        return
    original = module._init_optim_state

    @functools.wraps(original)
    def init_state(optimizer: Any, *args: Any, **kwargs: Any) -> None:
        had_state = bool(optimizer.state)
        original(optimizer, *args, **kwargs)
        if not had_state:  # torch has stepped it, without gradients: Adam would be one step ahead
            for state in optimizer.state.values():
                for name in _FIRST_STATE.keys() & state.keys():
                    value = state[name]
                    state[name] = value.fill_(_FIRST_STATE[name]) if torch.is_tensor(value) else type(value)(0)

    vars(module)["_init_optim_state"] = init_state


def _check_groups(model: Any, optimizers: Any, optim_state_dict: Any = None, **_: Any) -> None:
    loaded = (optim_state_dict or {}).get("param_groups")
    every = [optimizers] if isinstance(optimizers, torch.optim.Optimizer) else list(optimizers)
    count = sum(len(optimizer.param_groups) for optimizer in every)
    if loaded and len(loaded) != count:
        tell(
            f"the optimizer state{{place}} was saved with {len(loaded)} parameter groups, and this optimizer has "
            f"{count}: torch merges their learning rates and decays. Create it with the groups that were saved."
        )


def check_loads(state_dict: Mapping[str, Any], metadata: Any, *_: Any, **__: Any) -> None:
    """Look for values that are loaded into a type that cannot hold them."""
    for name, saved in metadata.state_dict_metadata.items():
        kind, value = getattr(getattr(saved, "properties", None), "dtype", None), state_dict.get(name)
        if kind is None or not isinstance(value, torch.Tensor) or kind == value.dtype:
            continue
        is_cut = not value.dtype.is_floating_point and not value.dtype.is_complex
        if not torch.can_cast(kind, value.dtype) or (is_cut and value.dtype.itemsize < kind.itemsize):
            tell(
                f"`{name}`{{place}} was saved as {kind} and is loaded into {value.dtype}, which cuts its values: "
                "load it into a tensor of the type that was saved."
            )


def check_saved_names(folder: Any, *args: Any, **kwargs: Any) -> None:
    """Look for optimizer states, whose numbers become text."""
    from torch.distributed.checkpoint.filesystem import FileSystemReader

    names = FileSystemReader(folder).read_metadata().state_dict_metadata
    if any(re.search(r"(^|\.)milestones\.\d+$", name) for name in names):
        tell(
            "dcp_to_torch_save{place} turns the milestones of a scheduler into text, and the rate is never lowered "
            "again: convert back with `Counter({int(key): value for key, value in saved.items()})`."
        )
    if any(re.search(r"(^|\.)state\.\d+\.", name) for name in names):
        tell(
            "dcp_to_torch_save{place} turns the numbers in an optimizer's state into text, and load_state_dict "
            'then finds no state: convert back with `{int(key): value for key, value in saved["state"].items()}`.'
        )


def prepare_safetensors(module: ModuleType) -> None:
    """Look for a writer of one file for all ranks, and for what a file of tensors cannot hold."""
    signature = inspect.signature(module.HuggingFaceStorageWriter.__init__)

    def look(*args: Any, **kwargs: Any) -> None:
        if dist.get_world_size() > 1 and not signature.bind(*args, **kwargs).arguments.get("save_distributed"):
            tell(
                "HuggingFaceStorageWriter{place} writes the parts of all ranks to one file, of which the last remains: "
                "pass save_distributed=True and enable_consolidation=True."
            )

    before(module.HuggingFaceStorageWriter, "__init__", look)

    def look_at_values(_: Any, plan: Any, *args: Any) -> None:
        if names := [item.index.fqn for item in plan.items if item.type.name == "BYTE_IO"]:
            tell(
                f"HuggingFaceStorageWriter{{place}} puts {', '.join(names[:3])} into a file of safetensors as bytes, "
                "which no reader of that format opens: pass tensors only, such as `torch.tensor(step)`."
            )

    before(module.HuggingFaceStorageWriter, "write_data", look_at_values)


# ---- torch: pipelines, compiler, extensions, TensorBoard


def prepare_schedules(module: ModuleType) -> None:
    """Look at the batch and the stages of each step."""
    for kind in (module.PipelineScheduleSingle, module.PipelineScheduleMulti):
        before(kind, "step", _check_step)


def _check_step(schedule: Any, *args: Any, **kwargs: Any) -> None:
    count = schedule._n_microbatches
    rows = len(args[0]) if args and isinstance(args[0], torch.Tensor) and args[0].ndim else 0
    if rows % count:
        tell(
            f"a batch of {rows} rows{{place}} does not divide into {count} microbatches: stages send as many rows as "
            "the first has, and what fills the last one is undefined."
        )
    for name, value in kwargs.items():
        is_other = isinstance(value, torch.Tensor) and value.ndim and len(value) != rows
        if is_other and rows and name not in ("target", "losses") and not schedule._kwargs_chunk_spec:
            tell(
                f"{name} of step(){{place}} is cut into microbatches along its first dimension ({len(value)}), though "
                f"the batch has {rows} rows: pass it in a list to give each microbatch all of it."
            )
    stages = getattr(schedule, "_stages", None) or [schedule._stage]
    weights = itertools.chain(*(stage.submod.parameters() for stage in stages))
    if (
        count > 1
        and schedule.scale_grads
        and schedule._has_backward
        and any(weight.grad is not None for weight in weights)
    ):
        tell(
            f"step(){{place}} divides the gradients of earlier steps by {count} once more: pass scale_grads=False and "
            "divide after the last one, or call zero_grad() before each step."
        )
    if "ZeroBubble" in type(schedule).__name__ or "DualPipe" in type(schedule).__name__:
        for stage in stages:
            if stage.stage_index and any(_has_hook(parameter) for parameter in stage.submod.parameters()):
                tell(
                    f"{type(schedule).__name__}{{place}} calls post-accumulate hooks of gradients on stage 0 only: do "
                    "their work after step(), or use Interleaved1F1B."
                )
    has_run = getattr(schedule, "_stages_forward_initialized", getattr(schedule, "_stage_forward_initialized", True))
    parts = [] if has_run or hasattr(schedule, "restores_buffers") else [stage.submod.modules() for stage in stages]
    if any(map(_counts_batches, itertools.chain(*parts))):
        tell(
            "the first step(){place} runs each stage once more to find shapes, and BatchNorm counts it: use "
            "axon_nb.parallel.Pipeline, which restores the buffers."
        )


def _has_hook(parameter: Any) -> bool:
    return bool(getattr(parameter, "_post_accumulate_grad_hooks", None))


def _counts_batches(module: Any) -> bool:
    return module.training and getattr(module, "num_batches_tracked", None) is not None


def check_shared_weights(pipe: Any, model: Any, *args: Any) -> None:
    """Look for weights that layers share, and that become a copy in each stage."""
    shared: dict[Any, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        shared.setdefault(parameter, []).append(name)
    stages = [dict(pipe.get_stage_module(number).named_parameters()) for number in range(pipe.num_stages)]
    for names in shared.values():
        if sum(any(name in stage for name in names) for stage in stages) > 1 and len(names) > 1:
            tell(
                f"{' and '.join(names)} are one parameter, of which pipeline(){{place}} gives each stage a copy: "
                "sum their gradients over these stages with all_reduce before each optimizer step."
            )


def check_conversion(module: Any) -> None:
    """Look at a module that torch is about to convert to SyncBatchNorm, without its children."""
    kind = type(module)
    is_norm = isinstance(module, torch.nn.BatchNorm1d | torch.nn.BatchNorm2d | torch.nn.BatchNorm3d)
    if is_norm and not kind.__module__.startswith("torch.nn."):
        tell(
            f"convert_sync_batchnorm{{place}} makes a plain SyncBatchNorm of {kind.__name__}, without its own forward, "
            "parameters and hooks: let a module of your own call a BatchNorm instead of extending it."
        )


def check_reduction(tensor: Any, op: Any = dist.ReduceOp.SUM, group: Any = None) -> None:
    """Look for reductions whose gradient torch takes for that of a sum."""
    if tensor.requires_grad and torch.is_grad_enabled() and op not in (dist.ReduceOp.SUM, dist.ReduceOp.AVG):
        name = str(getattr(op, "op", op)).rpartition(".")[-1]
        tell(
            f"the gradient of all_reduce with {name}{{place}} goes to the values of all ranks: gather them "
            "with all_gather of torch.distributed.nn.functional, and reduce the stack."
        )


def check_compiled(_: Any, model: Any, *args: Any, **kwargs: Any) -> None:
    """Look for DDP around modules of torch alone."""
    if type(model).__name__ == "DistributedDataParallel" and all(
        type(part).__module__.startswith("torch.nn.") for part in model.modules()
    ):
        tell(
            f"torch.compile(DDP({type(model.module).__name__})){{place}} compiles nothing, as torch skips modules "
            "of torch.nn there: use DDP(torch.compile(model))."
        )


def prepare_extensions(module: ModuleType) -> None:
    """Build each source in a folder of its own: of ranks that build at once, the second would load the first's."""
    original, signature = module.load_inline, inspect.signature(module.load_inline)

    @functools.wraps(original)
    def load_inline(*args: Any, **kwargs: Any) -> Any:
        given = signature.bind(*args, **kwargs).arguments
        if given.get("build_directory") is None:
            content = repr((torch.__version__, sys.version, sorted((key, repr(value)) for key, value in given.items())))
            root = os.environ.get("TORCH_EXTENSIONS_DIR") or module.get_default_build_root()
            folder = Path(root, f"{given['name']}-{hashlib.blake2b(content.encode(), digest_size=8).hexdigest()}")
            folder.mkdir(parents=True, exist_ok=True)
            given["build_directory"] = str(folder)
        return original(**given)

    module.load_inline = load_inline  # type: ignore[attr-defined]


def check_folder(_: None, writer: Any, *args: Any) -> None:
    """Look for files of several processes."""
    files = Path(writer.log_dir).glob("events.out.tfevents.*")
    if len({_writer_of(file) for file in files}) > 1:
        tell(
            f"several processes write to {writer.log_dir}{{place}}, and a TensorBoard that is open shows one of them "
            "only: give each rank a folder of its own, or write on rank 0 alone."
        )


def _writer_of(file: Path) -> str:
    """Return host and process in a name such as ``events.out.tfevents.1764371.host.123.0``."""
    return ".".join(file.name.split(".")[4:-1])


# ---- other libraries


def prepare_accelerate(module: ModuleType) -> None:
    """Give `split_between_processes` a copy of a dict: it writes the part into the dict that it gets."""
    original = module.PartialState.split_between_processes

    @functools.wraps(original)
    def split(state: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        return original(state, _copied(inputs), *args, **kwargs)

    module.PartialState.split_between_processes = split


def _copied(value: Any) -> Any:
    return {key: _copied(one) for key, one in value.items()} if type(value) is dict else value


def check_gathered(value: Any) -> None:
    """Look for objects that Accelerate takes apart."""
    if isinstance(value, str | dict) and dist.get_world_size() > 1:
        lost = "keys, without values" if isinstance(value, dict) else "letters"
        tell(f"gather_object{{place}} returns the {lost}: pass a list with the {type(value).__name__} in it.")


def check_mixture(dataset: Any, rank: int, world_size: int) -> None:
    """Look for mixtures whose sources alternate as the ranks do."""
    kind = "CyclingMultiSourcesExamplesIterable"
    sources = next((one.ex_iterables for one in vars(dataset).values() if type(one).__name__ == kind), ())
    if sources and dataset.num_shards % world_size and math.gcd(len(sources), world_size) > 1:
        tell(
            f"split_dataset_by_node{{place}} gives a rank examples of some of the {len(sources)} interleaved "
            "sources only: pass probabilities to interleave_datasets, or use as many shards as ranks."
        )


def check_columns(_: None, dataset: Any, *args: Any) -> None:
    """Look for columns that the first of the files lacks."""
    files = dataset.fragments[:64]  # each look reads a file's end
    if lost := {name for file in files for name in file.physical_schema.names} - set(dataset.schema.names):
        names = ", ".join(sorted(lost))
        tell(f"reading Parquet files{{place}} drops columns that the first file lacks: {names}.")


def check_sum(_: None, metric: Any, *args: Any) -> None:
    """Look for sums that are too large for their numbers."""
    total = metric.sum_value
    if total.dtype is torch.float32 and total.abs() >= 2**24:
        tell(
            "SumMetric{place} has reached 2**24, where float32 drops single counts: use "
            "`SumMetric().set_dtype(torch.float64)`."
        )


def prepare_shared_arrays(_: ModuleType) -> None:
    """Look for read-only arrays that become tensors without torch's warning."""
    before(torch, "from_dlpack", _check_array)


def _check_array(array: Any, *args: Any, **kwargs: Any) -> None:
    if not getattr(getattr(array, "flags", None), "writeable", True):
        tell(
            "the tensor{place} shares the memory of a read-only array, so writing to it changes what others read, such "
            "as Ray's stored object or a frame: use `torch.tensor(array)`, which copies."
        )


def prepare_series(module: ModuleType) -> None:
    """Look for comparisons with tensors, masks of them, and torch's warnings about an index and shared memory."""
    prepare_shared_arrays(module)

    def look(_: Any, other: Any) -> None:
        if isinstance(other, torch.Tensor) and other.ndim:
            tell("a pandas Series never equals a tensor{place}, whatever they hold: compare with `tensor.numpy()`.")

    before(module.Series, "__eq__", look)
    before(module.Series, "__ne__", look)

    def look_at_mask(_: Any, key: Any) -> None:
        if isinstance(key, torch.Tensor) and key.dtype is torch.bool:
            tell("iloc{place} takes a mask that is a tensor as positions 0 and 1: use `mask.numpy()`.")

    parts = vars(sys.modules["pandas.core.indexing"])
    before(next(parts[name] for name in parts if name.endswith("iLocIndexer")), "__getitem__", look_at_mask)
    show = warnings.showwarning

    def showwarning(message: Warning | str, *args: Any, **kwargs: Any) -> None:
        show(message, *args, **kwargs)
        if "non-tuple sequence for multidimensional indexing" in str(message):
            tell("a pandas Series as an index{place} is taken apart if its labels repeat: use `series.to_numpy()`.")
        source = linecache.getline(*args[1:3])  # an index may be such an array, and is only read
        if "NumPy array is not writable" in str(message) and ("from_numpy" in source or "as_tensor" in source):
            tell(
                "the tensor{place} shares memory with the array's frame and with frames made from it, so writing to it "
                "changes them all: use `torch.tensor(array)`, which copies."
            )

    warnings.showwarning = showwarning


def check_mean(_: Any, data: Any, group: Any = None, reduce_op: Any = "mean") -> None:
    """Look for means of integers."""
    if str(reduce_op).lower() in ("mean", "avg") and any(_is_integer(value) for value in tree_leaves(data)):
        tell("Fabric.all_reduce{place} cuts the mean of integers to an integer: pass floats.")


def _is_integer(value: Any) -> bool:
    return (torch.is_tensor(value) and not value.is_floating_point()) or isinstance(value, int)


def check_epoch(sampler: Any, state: Any) -> None:
    """Look for states of a sampler in epoch 0."""
    if sampler.shuffle and not sampler.epoch:
        tell(
            "StatefulDistributedSampler{place} resumes in the order of epoch 0, as its state has no epoch: call "
            "set_epoch() with the epoch that was saved, before the first batch."
        )


def check_generator(loader: Any, state: Any) -> None:
    """Look for loaders that shuffle by a generator of the user's, from which a resumed one draws once more."""
    generator = loader.generator
    if generator is not None and not loader.num_workers and getattr(loader.sampler, "generator", None) is generator:
        tell(
            "StatefulDataLoader.load_state_dict{place} leaves the next epochs in another order than without a "
            "resume: give the generator to `sampler=RandomSampler(data, generator=...)` instead."
        )


def prepare_tensordict(module: ModuleType) -> None:
    """Look for text in what is received or reduced."""

    def look(own: Any, *args: Any, **kwargs: Any) -> None:
        if texts := [key for key, value in own.items(include_nested=True) if module.is_non_tensor(value)]:
            tell(f"recv and all_reduce of a TensorDict{{place}} leave text as it was here, such as {texts[0]!r}.")

    for name in ("recv", "irecv", "all_reduce"):
        before(module.TensorDictBase, name, look)


def check_stack(stack: Any, *args: Any, **kwargs: Any) -> None:
    """Look for entries that only some elements have."""
    each = [set(one.keys(True, True)) for one in stack.tensordicts]
    if missing := set.union(*each) - set.intersection(*each):
        names = ", ".join(sorted(map(str, missing)))
        tell(f"contiguous(){{place}} drops what only some of the stacked TensorDicts have: {names}.")
