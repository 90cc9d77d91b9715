"""How a process becomes a rank: run the engine, then join the world when the notebook says so."""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
from IPython.core.getipython import get_ipython

from axon_nb.engine import dist_hooks, kernel_hooks, namespace, short_traceback
from axon_nb.engine.cells import CellRunner
from axon_nb.engine.control import control_handlers
from axon_nb.engine.groups import form_default_group, nccl, recovery
from axon_nb.engine.interrupts import Interrupts
from axon_nb.engine.sampler import Sampler
from axon_nb.engine.session import JoinConfig, RankSession, set_current
from axon_nb.engine.stdio import OutputBudget
from axon_nb.engine.store import AgentStore
from axon_nb.engine.telemetry import Telemetry

__all__ = ["describe", "join", "run_engine"]


def run_engine(argv: list[str]) -> None:
    """Run an ipyparallel engine in this process until it ends; the entry of a forked rank."""
    from ipyparallel.engine.app import IPEngine

    IPEngine.launch_instance(argv=argv)


def describe() -> dict[str, Any]:
    """Where this process is, before it joins: host and pid."""
    return {"host": socket.gethostname(), "pid": os.getpid()}


def join(*, epoch: int = 0, groups: Sequence[dict[str, Any]] = (), **settings: Any) -> dict[str, Any]:
    """Join the world; collective over all ranks, returns when all are there.

    Args:
        epoch: How often the groups have been formed anew; above 0 this rank replaces one that died.
        groups: The groups besides the default one that the rank it replaces was in.
        **settings: The fields of `JoinConfig`.
    """
    config = JoinConfig(**settings)
    kernel = _shell().kernel
    namespace.set_environment(config)
    if config.backend == "nccl":
        nccl.set_environment(one_host=config.local_world_size == config.world_size)
    torch.set_num_threads(config.threads)
    device = torch.device(config.device)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    session = RankSession(config=config, kernel=kernel, device=device)
    set_current(session)
    missing = kernel_hooks.missing(kernel)  # before ours are set under the same names
    _install(session)
    store = AgentStore(config.store, timedelta(seconds=config.timeout_s))
    # torch keeps the C++ half alone; without the Python half every call on it fails as "not implemented".
    session.extras["store"] = store
    form_default_group(
        config.backend,
        store=store,
        rank=config.rank,
        world_size=config.world_size,
        device=device,
        timeout_s=config.timeout_s,
        epoch=epoch,
    )
    recovery.recreate(list(groups))
    if epoch and (native := nccl.groups()) is not None:
        native.reform(epoch)
    recovery.agree_on_names(device if config.backend == "nccl" else "cpu")
    dist_hooks.install()
    namespace.inject_names(kernel.shell.user_ns, config, device)
    return {**describe(), "device": str(device), "hooks_missing": missing}


def _shell() -> Any:
    return get_ipython()


def _install(session: RankSession) -> None:
    kernel = session.kernel
    interrupts = Interrupts(kernel)
    interrupts.install()
    kernel_hooks.install(kernel, interrupts.hold_async)
    runner = CellRunner(session, interrupts, OutputBudget(kernel, session.config.output_limit))
    kernel_hooks.wrap_do_execute(kernel, runner.run)
    short_traceback.install(kernel.shell)
    sampler = Sampler(session)
    telemetry = Telemetry(session, sampler)
    kernel_hooks.add_control_handlers(kernel, control_handlers(sampler, interrupts, telemetry))
    session.extras["runner"] = runner
