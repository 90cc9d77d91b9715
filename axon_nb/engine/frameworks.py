"""Prepares other frameworks for cells, when the rank joins or when a cell imports them.

Scripts also run as cells: the functions with which a script creates its processes find an existing group. They are
replaced by name in torch.distributed and torch.multiprocessing, in rank processes only.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import torch.distributed as dist
import torch.multiprocessing as mp

from axon_nb.compat import accelerate, deepspeed, environment, launchers
from axon_nb.compat import environment as dynamo_rules
from axon_nb.compat.import_hooks import after_import
from axon_nb.compat.progress_bars import install_text_bars
from axon_nb.engine.groups import wrapper_reset
from axon_nb.engine.groups.store import install_store_waits, interruptible_init_rpc
from axon_nb.engine.session import RankSession
from axon_nb.errors import UsageError

_NAME = "axon_nb"


def install_frameworks(session: RankSession) -> None:
    """Make frameworks use the existing ranks; call it when the rank joins."""
    config = session.config
    vars(sys).pop("ps1", None)  # IPython sets it; Lightning and others refuse what torchrun starts where it is set
    environment.set_environment(config.device, local_rank=config.local_rank)
    if config.device == "cpu":
        synchronise = functools.partial(accelerate.synchronise_on_cpus, world_size=config.world_size)
        after_import("accelerate.state", synchronise)
    install_text_bars()
    after_import("torch._dynamo.trace_rules", dynamo_rules.skip_axon_nb_code)
    launch = functools.partial(accelerate.call_on_ranks, world_size=config.world_size)
    after_import("accelerate.launchers", launch)
    for name in launchers.LIGHTNING_LAUNCHERS:
        after_import(name, launchers.call_on_rank)
    after_import("ignite.distributed.comp_models.native", launchers.attach_ignite)
    after_import("deepspeed.comm.torch", deepspeed.skip_shm_all_reduce)

    def prepare_engine(module: ModuleType) -> None:
        deepspeed.wrap_step(module, session.steps.after_foreign_step)
        wrapper_reset.track_engines()

    after_import("deepspeed.runtime.engine", prepare_engine)


def install_dist_hooks() -> None:
    """Replace functions that create, end and start ranks; call it once the default group exists."""
    c10d = dist.distributed_c10d
    init = _attach_or_init(c10d.init_process_group)
    destroy = _refuse_default_destroy(c10d.destroy_process_group)
    for module in (dist, c10d):
        vars(module).update(init_process_group=init, destroy_process_group=destroy)
    install_store_waits()
    after_import("torch.distributed.rpc", lambda rpc: vars(rpc).update(init_rpc=interruptible_init_rpc(rpc.init_rpc)))
    vars(mp).update(spawn=_call_on_rank("spawn"), start_processes=_call_on_rank("start_processes"))


def _attach_or_init(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def init_process_group(backend: str | None = None, *args: Any, **kwargs: Any) -> None:
        if not dist.is_initialized():
            return original(backend, *args, **kwargs)
        rank, size = dist.get_rank(), dist.get_world_size()
        wanted_rank, wanted_size = kwargs.get("rank", -1), kwargs.get("world_size", -1)
        if wanted_size not in (-1, None, size) or wanted_rank not in (-1, None, rank):
            raise UsageError(
                f"init_process_group(rank={wanted_rank}, world_size={wanted_size}) on rank {rank} of {size}: a group "
                "of all ranks already exists. Omit both arguments, or use dist.new_group for fewer ranks."
            )
        actual = dist.get_backend()
        requested = str(backend).lower() if backend else actual
        if actual not in requested:
            print(f"{_NAME}: the ranks use {actual}; init_process_group({requested!r}) attached to that group.")
        return None

    return init_process_group


def _refuse_default_destroy(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def destroy_process_group(group: Any = None) -> None:
        if group is not None and group is not dist.group.WORLD:
            return original(group)
        print(f"{_NAME}: destroy_process_group() keeps the default group because the next cells need it.")
        return None

    return destroy_process_group


def _call_on_rank(name: str) -> Callable[..., None]:
    def call(
        function: Callable[..., Any], args: Sequence[Any] = (), nprocs: int = 1, join: bool = True, **_: Any
    ) -> None:
        """Call the function as this rank: the ranks of the cell take the place of the processes."""
        size = dist.get_world_size()
        if nprocs != size:
            raise UsageError(
                f"mp.{name}(fn, nprocs={nprocs}): in this cell each of the {size} ranks calls fn. Pass "
                f"nprocs=world_size, or start {nprocs} with `%distributed start -n {nprocs}`."
            )
        if not join:
            raise UsageError(f"mp.{name}(fn, join=False): ranks call fn themselves, and wait for its end; omit join.")
        function(dist.get_rank(), *args)

    return call
