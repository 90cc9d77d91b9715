"""Launchers of Accelerate, Lightning and Ignite in a cell: they use the ranks instead of starting processes.

Keeps Accelerate synchronised on CPU ranks, where by default it silently trains every rank independently. Its
`PartialState` assumes that a process without a GPU is the only one, whatever torchrun's variables say, unless it gets
``cpu=True``. ``ACCELERATE_USE_CPU`` makes `Accelerator` pass that on. But a `PartialState()` created earlier, directly
or by a logger, does not read it, and every later `Accelerator` shares its state.

Private hooks: `accelerate.state` in the register (where something is missing, the variable alone is left, and a warning
says so); Lightning's class of launchers that fork or spawn, and the class of Ignite's distributed model (without them
these launchers fail on ranks).
"""

from __future__ import annotations

import functools
import inspect
import os
import warnings
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import torch.distributed as dist

from axon_nb.records.hooks import missing_hooks, tested_versions

_ACCELERATE_LAUNCHERS = ("debug_launcher", "notebook_launcher")
_ACCELERATE_PLUGINS = {"ACCELERATE_USE_DEEPSPEED": "DeepSpeed", "ACCELERATE_USE_FSDP": "FSDP"}
LIGHTNING_LAUNCHERS = (
    "lightning.fabric.strategies.launchers.multiprocessing",
    "lightning.pytorch.strategies.launchers.multiprocessing",
    "lightning_fabric.strategies.launchers.multiprocessing",
    "pytorch_lightning.strategies.launchers.multiprocessing",
)
"""Modules of Lightning, and of its packages by their older names, whose launchers start processes."""


def call_on_ranks(launchers: ModuleType, *, world_size: int) -> None:
    """Make the launchers call the training function on this rank, as they do if there is nothing to start.

    Processes started from ranks would try to rendezvous on a port where nothing listens.

    Args:
        launchers: The module ``accelerate.launchers``, just imported; ``accelerate`` itself takes them from there.
        world_size: Number of ranks.
    """
    for name in _ACCELERATE_LAUNCHERS:
        if not missing_hooks("accelerate.launch", launchers=launchers):
            setattr(
                launchers, name, _accelerate_caller(getattr(launchers, name), launchers.patch_environment, world_size)
            )


def _accelerate_caller(
    original: Callable[..., Any], patch_environment: Callable[..., Any], world_size: int
) -> Callable[..., None]:
    @functools.wraps(original)
    def launch(
        function: Callable[..., Any],
        args: Sequence[Any] = (),
        num_processes: int | None = None,
        mixed_precision: str = "no",
        **_: Any,
    ) -> None:
        if num_processes not in (None, world_size):
            print(
                f"axon_nb: {original.__name__}({num_processes} processes) runs on the {world_size} ranks of this cell."
            )
        with patch_environment(accelerate_mixed_precision=str(mixed_precision).lower()):
            function(*args)

    return launch


def synchronise_on_cpus(state: ModuleType, *, world_size: int) -> None:
    """Make every `PartialState` of this process belong to all ranks.

    Args:
        state: The module ``accelerate.state``, just imported.
        world_size: Number of ranks.
    """
    if absent := missing_hooks("accelerate.state", state=state):
        warnings.warn(
            f"axon_nb was tested with accelerate {tested_versions('accelerate')[-1]}; this version lacks {absent[0]}. "
            "Check `accelerator.num_processes` before you train.",
            stacklevel=2,
        )
        return
    kind = state.PartialState
    original = kind.__init__
    reported: list[str] = []

    @functools.wraps(original)
    def __init__(self: Any, cpu: bool = False, **kwargs: Any) -> None:
        original(self, True, **kwargs)
        for variable, name in _ACCELERATE_PLUGINS.items():
            if os.environ.get(variable, "").lower() == "true" and name not in reported:
                reported.append(name)
                print(
                    f"axon_nb: Accelerate does not support {name} on CPUs; it trains this model with "
                    "DistributedDataParallel, with full weights on every rank."
                )

    kind.__init__ = __init__
    if kind._shared_state and kind().num_processes != world_size:  # created before this process was a rank
        state.AcceleratorState._reset_state(reset_partial_state=True)


def call_on_rank(launchers: ModuleType) -> None:
    """Have ``ddp_notebook``, ``ddp_fork`` and ``ddp_spawn`` train the ranks of the cell.

    Args:
        launchers: One of `LIGHTNING_LAUNCHERS`, just imported.
    """
    kind = launchers._MultiProcessingLauncher
    has_trainer = "trainer" in inspect.signature(kind.launch).parameters

    @functools.wraps(kind.launch)
    def launch(self: Any, function: Any, *args: Any, **kwargs: Any) -> Any:
        if has_trainer:  # what processes would send results to
            kwargs.pop("trainer", None)
        return function(*args, **kwargs)

    kind.launch = launch


def attach_ignite(native: ModuleType) -> None:
    """Have `idist.spawn` and `idist.Parallel` use the group of the ranks.

    Args:
        native: The module ``ignite.distributed.comp_models.native``, just imported.
    """
    kind = native._NativeDistModel
    create = kind.create_from_backend

    @functools.wraps(create)
    def create_from_backend(*args: Any, **kwargs: Any) -> Any:
        return kind.create_from_context() if dist.is_initialized() else create(*args, **kwargs)

    kind.create_from_backend = staticmethod(create_from_backend)
