"""Prepares frameworks for ranks: environment variables, torch.compile, patches right after imports, progress bars.

torchrun's variables are set elsewhere. Private hook: Dynamo's list of skipped code. If a compiled model communicates,
Dynamo would also try to compile the methods of recoverable groups and fail, because their objects are opaque to it.

Ranks start without the frameworks that cells may use, as each takes seconds to import. Post-import hooks patch a
framework's module right after it was executed, before the cell's import statement returns.

tqdm and rich draw bars as text on ranks: their widgets have no model in the notebook. tqdm's notebook bars become its
text bars. rich takes the rank's output for a terminal: it moves its bars with control sequences, which the notebook
interprets.
"""

from __future__ import annotations

import functools
import os
import shutil
import sys
import warnings
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

from axon_nb.records.environment import DEEPSPEED_ACCELERATOR
from axon_nb.records.hooks import missing_hooks

_PACKAGES = ("axon_nb.comm", "axon_nb.engine", "axon_nb.records", "axon_nb.shell")
SURPRISES: Mapping[str, str | tuple[str, str, str]] = {
    "accelerate.state": "prepare_accelerate",
    "accelerate.utils.operations": ("before", "gather_object", "check_gathered"),
    "datasets.distributed": ("before", "split_dataset_by_node", "check_mixture"),
    "lightning.fabric.fabric": ("before", "Fabric.all_reduce", "check_mean"),
    "lightning_fabric.fabric": ("before", "Fabric.all_reduce", "check_mean"),
    "pandas.core.series": "prepare_series",
    "pyarrow.parquet.core": ("after", "ParquetDataset.__init__", "check_columns"),
    "ray": "prepare_shared_arrays",
    "tensordict._lazy": ("before", "LazyStackedTensorDict.contiguous", "check_stack"),
    "tensordict.base": "prepare_tensordict",
    "torch._dynamo.eval_frame": ("before", "OptimizedModule.__init__", "check_compiled"),
    "torch.distributed.checkpoint.default_planner": ("before", "create_default_local_load_plan", "check_loads"),
    "torch.distributed.checkpoint.format_utils": ("before", "dcp_to_torch_save", "check_saved_names"),
    "torch.distributed.checkpoint.hf_storage": "prepare_safetensors",
    "torch.distributed.checkpoint.state_dict": "prepare_state_dicts",
    "torch.distributed.fsdp._fully_shard._fsdp_param": "prepare_fully_shard",
    "torch.distributed.fsdp._fully_shard._fsdp_state": "prepare_casts",
    "torch.distributed.nn.functional": ("before", "all_reduce", "check_reduction"),
    "torch.distributed.pipelining": ("after", "pipeline", "check_shared_weights"),
    "torch.distributed.pipelining.schedules": "prepare_schedules",
    "torch.distributed.tensor": "watch_dtensors",
    "torch.distributed.tensor.parallel": "prepare_parallelize",
    "torch.utils.cpp_extension": "prepare_extensions",
    "torch.utils.tensorboard.writer": ("after", "SummaryWriter.__init__", "check_folder"),
    "torchdata.stateful_dataloader": ("before", "StatefulDataLoader.load_state_dict", "check_generator"),
    "torchdata.stateful_dataloader.sampler": ("before", "StatefulDistributedSampler.load_state_dict", "check_epoch"),
    "torchmetrics.aggregation": ("after", "SumMetric.update", "check_sum"),
}
"""By module: the function of `axon_nb.compat.surprises` or `sharded_tensors` that prepares it after its import; or when
which of `surprises` looks at the calls of one of the module's functions."""
Hook = Callable[[ModuleType], None]
"""Called with the imported module, and again when it is reloaded."""


def set_environment(device: str, *, local_rank: int, environ: MutableMapping[str, str] = os.environ) -> None:
    """Set the variables that Accelerate, transformers and DeepSpeed read; call it before any of them is imported.

    Args:
        device: Device of this rank: ``cpu`` or ``cuda:<index>``.
        local_rank: Local rank on this host.
        environ: The process's environment.
    """
    environ["ACCELERATE_TORCH_DEVICE"] = device
    if device == "cpu":
        # Otherwise each rank trains alone: https://github.com/huggingface/accelerate/issues/2741
        environ["ACCELERATE_USE_CPU"] = "true"
        # Otherwise DeepSpeed would use a GPU if the machine has one.
        environ.setdefault(DEEPSPEED_ACCELERATOR.name, DEEPSPEED_ACCELERATOR.default)
    elif device != f"cuda:{local_rank}":
        # Ranks share a GPU: Accelerate would wrap models for the GPU with the local rank's index.
        environ["ACCELERATE_BYPASS_DEVICE_MAP"] = "true"
    _find_ninja(environ)


def _find_ninja(environ: MutableMapping[str, str]) -> None:
    """Put ninja, with which DeepSpeed builds C++, on the PATH: kernels lack the folder of Python packages' programs."""
    beside = Path(sys.executable).parent
    if shutil.which("ninja", path=environ.get("PATH")) is None and (beside / "ninja").exists():
        environ["PATH"] = os.pathsep.join(filter(None, [environ.get("PATH"), str(beside)]))


def skip_axon_nb_code(trace_rules: ModuleType) -> None:
    """Make Dynamo run our communication code as it is instead of compiling it.

    Args:
        trace_rules: The module ``torch._dynamo.trace_rules``, just imported.
    """
    if not missing_hooks("compat.dynamo", trace_rules=trace_rules):
        for package in _PACKAGES:
            trace_rules.add(package)


def keep_children(profiler: ModuleType) -> None:
    """Have `%memit` raise what its statement raises once it is done: else it first kills all children of the process.

    In a notebook these include the host agent, and so all ranks; on a rank what its cells have started.

    Args:
        profiler: The module ``memory_profiler``, just imported.
    """
    original = profiler.memory_usage

    @functools.wraps(original)
    def memory_usage(proc: Any = -1, *args: Any, **kwargs: Any) -> Any:
        parts = [proc] if callable(proc) else proc
        if not isinstance(parts, (list, tuple)):
            return original(proc, *args, **kwargs)
        function, *rest = parts
        given, named = rest[0] if rest else (), rest[1] if len(rest) > 1 else {}
        errors: list[Exception] = []

        def measured() -> Any:
            try:
                return None if errors else function(*given, **named)  # what is short is measured again
            except Exception as error:
                errors.append(error)
                return None

        result = original((measured, (), {}), *args, **kwargs)
        if errors:
            raise errors[0]
        return result

    vars(profiler)["memory_usage"] = memory_usage


class _Finder(MetaPathFinder):
    """Delegates to the other finders and hooks the loaders of the specs that they find."""

    def __init__(self) -> None:
        self.hooks: dict[str, list[Hook]] = {}

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Find and hook the spec of a module with a hook; None for all others."""
        if fullname not in self.hooks:
            return None
        for finder in sys.meta_path:
            if finder is not self and hasattr(finder, "find_spec"):
                spec = finder.find_spec(fullname, path, target)
                if spec is not None:
                    _hook_loader(spec.loader, self.hooks[fullname])
                    return spec
        return None


def after_import(name: str, hook: Hook) -> None:
    """Call `hook` whenever the module `name` has been executed, and at once if it is already imported.

    A module may have several hooks. A failing hook does not fail the import; it warns.
    """
    finder = next((item for item in sys.meta_path if isinstance(item, _Finder)), None)
    if finder is None:
        sys.meta_path.insert(0, finder := _Finder())
    finder.hooks.setdefault(name, []).append(hook)
    if name in sys.modules:
        _call(hook, sys.modules[name])


def _hook_loader(loader: Any, hooks: Sequence[Hook]) -> None:
    execute = getattr(loader, "exec_module", None)
    if execute is None:
        return

    def exec_module(module: ModuleType) -> None:
        # Restore the loader: others use it to read the package's sources and files.
        del loader.exec_module
        execute(module)
        for hook in hooks:
            _call(hook, module)

    loader.exec_module = exec_module


def _call(hook: Hook, module: ModuleType) -> None:
    try:
        hook(module)
    except Exception as error:
        warnings.warn(
            f"axon_nb could not patch {module.__name__} {_version(module)} for this rank: "
            f"{type(error).__name__}: {error}",
            stacklevel=2,
        )


def _version(module: ModuleType) -> str:
    package = sys.modules.get(module.__name__.partition(".")[0])
    return str(getattr(package, "__version__", "")) or "(unknown version)"


def install_text_bars() -> None:
    """Have bars drawn as text from now on, also in modules that are imported later."""
    after_import("tqdm.notebook", _draw_tqdm_as_text)
    after_import("rich.console", _draw_rich_as_text)


def _draw_tqdm_as_text(module: ModuleType) -> None:
    tqdm: Any = sys.modules["tqdm.std"].tqdm

    class TextBar(tqdm):
        """A text bar with the parameters of `tqdm.notebook.tqdm`."""

        def __init__(self, *args: Any, display: bool = True, **kwargs: Any) -> None:
            del display  # whether to show the widget at once
            super().__init__(*args, **kwargs)

    def trange(*args: Any, **kwargs: Any) -> TextBar:
        return TextBar(range(*args), **kwargs)

    vars(module).update(tqdm=TextBar, tqdm_notebook=TextBar, trange=trange, tnrange=trange)


def _draw_rich_as_text(module: ModuleType) -> None:
    init = module.Console.__init__

    @functools.wraps(init)
    def init_for_terminal(console: Any, **options: Any) -> None:
        options.setdefault("force_jupyter", False)
        if options.get("file") is None and options.get("force_terminal") is None:
            options["force_terminal"] = True
        init(console, **options)

    module.Console.__init__ = init_for_terminal
