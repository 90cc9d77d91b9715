"""Startup of a rank: runs the engine, joins the world when the notebook asks for it, and prepares other frameworks.

A launcher may have copied the connection file to the host of this rank. The rank removes that copy when it exits,
because it holds the cluster's key. On the notebook's own host the agent removes its folder.

Frameworks are prepared when the rank joins or when a cell imports them. Scripts also run as cells: the functions with
which a script creates its processes find an existing group. They are replaced by name in torch.distributed and
torch.multiprocessing, in rank processes only.
"""

from __future__ import annotations

import atexit
import functools
import gc
import os
import resource
import shutil
import signal
import socket
import sys
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any

import msgspec
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from IPython.core.getipython import get_ipython

from axon_nb.compat import deepspeed, environment, launchers
from axon_nb.compat import environment as dynamo_rules
from axon_nb.compat.environment import after_import, install_text_bars
from axon_nb.engine.debugger import Breakpoints, Pager, PostMortem
from axon_nb.engine.groups import creation, init_default_group, recovery
from axon_nb.engine.groups.gloo import LOOPBACK
from axon_nb.engine.groups.store import AgentStore, install_store_waits, interruptible_init_rpc
from axon_nb.engine.inspection.telemetry import Sampler, Telemetry, TrainingJob
from axon_nb.engine.kernel import hooks, shell
from axon_nb.engine.kernel.cells import CellLog, CellRunner
from axon_nb.engine.kernel.control import VIEWS, CompletionService, control_handlers, install_control_thread
from axon_nb.engine.kernel.interrupts import OWN_SIGNAL, InterruptHandler, OptimizerSteps
from axon_nb.engine.output import NativeOutput, OutputBudget, RankStream, enable_crash_reports, install_fork_defaults
from axon_nb.engine.self_test import build, start_in_child, startup_verdict
from axon_nb.engine.session import RankSession, current, inject_names, set_current, set_environment
from axon_nb.engine.snapshot.history import History
from axon_nb.engine.snapshot.memory import HostMemory
from axon_nb.errors import UsageError
from axon_nb.host.connections import store_key
from axon_nb.host.resources import usable_cores
from axon_nb.host.shared_memory import find_kept_memory
from axon_nb.records.environment import HOST_NAME
from axon_nb.records.hooks import read_all
from axon_nb.records.protocol.agent import EngineInfo
from axon_nb.records.protocol.inspection import FailureRequest
from axon_nb.records.protocol.recovery import DirectRequest, GroupRecord, JoinConfig
from axon_nb.records.protocol.wire import own_version
from axon_nb.records.telemetry import set_cell_source

_MAX_FILES = 1 << 16
"""Children inherit the limit, and some programs close all descriptors below it one by one."""
_NAME = "axon_nb"


def install_cleanup() -> None:
    """Register removal of the connection file's folder at exit, if axon_nb copied it here."""
    from ipyparallel.engine.app import IPEngine

    profile = Path(IPEngine.instance().profile_dir.location)
    # Only <base>/axon_nb-<uid>/<random>/profile is removed. On a disk that the hosts share, the folder holds the
    # agent's own file and belongs to the agent.
    copied = not (profile.parent / "agent.json").exists()
    if copied and profile.name == "profile" and profile.parent.parent.name.startswith("axon_nb-"):
        atexit.register(shutil.rmtree, profile.parent, ignore_errors=True)
        signal.signal(signal.SIGTERM, functools.partial(_on_sigterm, profile.parent))


def _on_sigterm(copied: Path, number: int, frame: Any) -> None:
    shutil.rmtree(copied, ignore_errors=True)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.raise_signal(signal.SIGTERM)


def prepare() -> None:
    """Do, once in the process from which ranks are forked, what would take each of them time and memory."""
    read_all()
    build()
    hooks.hold_modules()


def before_forks() -> None:
    """Do the same each time before ranks are forked: modules may have come since."""
    hooks.note_modules()


def run_engine(argv: list[str]) -> None:
    """Run an ipyparallel engine in this process until it exits; the entry point of a forked rank."""
    from ipyparallel.engine.app import IPEngine

    start_in_child()
    enable_crash_reports()
    # A kernel imports debugpy for a front end that debugs it, which takes each rank 120 modules; a rank has none.
    sys.modules.setdefault("debugpy", None)  # type: ignore[arg-type]
    install_control_thread()
    hooks.hide_modules()
    IPEngine.launch_instance(argv=argv, out_stream_factory=RankStream)


def describe() -> EngineInfo:
    """Describe this process before it joins."""
    return EngineInfo(
        host=HOST_NAME.get() or socket.gethostname(),
        pid=os.getpid(),
        cores=usable_cores(),
        gpus=torch.cuda.device_count(),
        version=own_version(),
        self_test=startup_verdict().without_passed(),
    )


def join(config: JoinConfig, *, epoch: int = 0, groups: Sequence[GroupRecord] = ()) -> EngineInfo:
    """Join the world; a collective call that returns when all ranks have joined.

    Args:
        config: How this rank joins.
        epoch: How often the groups have been rebuilt; above 0, this rank replaces one that died.
        groups: Groups besides the default one that the replaced rank was in.
    """
    kernel = _shell().kernel
    if sys.modules.get("debugpy", kernel) is None:
        del sys.modules["debugpy"]  # cells may import it
    hooks.show_modules(kernel.shell)
    _raise_file_limit()
    set_environment(config)
    if config.backend == "nccl":
        creation.set_nccl_environment(one_host=config.local_world_size == config.world_size)
    torch.set_num_threads(config.threads)
    device = torch.device(config.device)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    session = RankSession(config=config, kernel=kernel, device=device)
    set_current(session)
    native_output = NativeOutput((sys.stdout, sys.stderr))
    native_output.start()
    _install(session, native_output)
    store = AgentStore(
        config.store, timedelta(seconds=config.timeout_s), key=store_key(kernel.session.key), abort=session.groups.abort
    )
    # torch holds only the C++ half; without the Python half every call on it fails as "not implemented".
    session.store = store
    session.groups.gloo.listen_on(store.own_ip)
    if config.backend == "nccl":
        creation.set_nccl_interface(store.own_ip)
    if store.own_ip != LOOPBACK:
        install_cleanup()
    init_default_group(
        config.backend,
        store=store,
        rank=config.rank,
        world_size=config.world_size,
        device=device,
        timeout_s=config.timeout_s,
        epoch=epoch,
        recoverable=config.recoverable,
        max_bytes=config.group_memory,
        state=session.groups,
    )
    if (kept := find_kept_memory(config.rank)) is not None and os.fstat(kept).st_size:
        # Of a session before, or of the process that this one replaces: the next cell may switch protection off.
        session.protection.forget() if not epoch else session.protection.steps()
    if epoch:
        recovery.join_groups(groups, epoch=epoch)
    recovery.sync_group_count(device if config.backend == "nccl" else "cpu")
    install_dist_hooks()
    inject_names(kernel.shell.user_ns, config, device)
    install_fork_defaults(OWN_SIGNAL, native_output)
    shell.install_cell_names(kernel.shell)
    shell.install_autoreload(kernel.shell)
    shell.install_restored_names(kernel.shell, lambda: inject_names(kernel.shell.user_ns, session.config, device))
    hooks.hold_modules()
    # Objects that exist now stay, so garbage collection and the search for wrappers after a failed cell skip them.
    gc.freeze()
    recovery.track_wrappers()
    return msgspec.structs.replace(describe(), device=str(device), seed=torch.initial_seed())


def _raise_file_limit() -> None:
    """Allow as many open files as the system lets this process have: groups, loaders and users' files need them."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MAX_FILES if hard == resource.RLIM_INFINITY else min(hard, _MAX_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def _shell() -> Any:
    return get_ipython()


def _install(session: RankSession, native_output: NativeOutput) -> None:
    kernel = session.kernel
    steps = OptimizerSteps()
    steps.install()
    session.steps = steps
    install_frameworks(session)
    sampler = Sampler(session)
    job = TrainingJob(session)
    job.count_steps()
    set_cell_source(lambda: session.cell)

    def defers(frame: FrameType | None) -> bool:
        views = session.parts.get(VIEWS)
        return (views is not None and views.gradients.defers_interrupt(frame)) or steps.defers_interrupt(frame)

    interrupts = InterruptHandler(kernel, defers)
    interrupts.install()
    hooks.install(kernel, interrupts.track_task)
    log = CellLog()
    log.sees_all = hooks.tap_output(kernel, log.tap)
    budget = OutputBudget(kernel, native_output, session.config.output_limit)
    tracebacks = shell.Tracebacks()
    tracebacks.install(kernel.shell)
    pager = Pager()
    pager.install(kernel.shell)
    post_mortem = PostMortem(pager)
    session.post_mortem = post_mortem
    session.snapshots = History(kernel.shell.user_ns, steps, HostMemory(is_pinned=session.device.type == "cuda"))
    breakpoints = Breakpoints(session, defers)
    breakpoints.install()
    runner = CellRunner(
        session, interrupts, budget, log, tracebacks=tracebacks, post_mortem=post_mortem, breakpoints=breakpoints
    )
    hooks.serve_cells(kernel, runner.run)
    shell.install_exits(kernel.shell)
    shell.install_shell_commands(kernel.shell, interrupts)
    telemetry = Telemetry(session, sampler)
    handlers = control_handlers(session, job, interrupts, telemetry, log, breakpoints=breakpoints)
    hooks.add_control_handlers(kernel, handlers)
    hooks.add_control_handlers(kernel, CompletionService(kernel.shell).handlers())
    direct = hooks.DirectChannel(kernel)
    hooks.add_control_handlers(kernel, {FailureRequest: post_mortem.report, DirectRequest: direct.connect})
    session.runner = runner


def install_frameworks(session: RankSession) -> None:
    """Make frameworks use the existing ranks; call it when the rank joins."""
    config = session.config
    vars(sys).pop("ps1", None)  # IPython sets it; Lightning and others refuse what torchrun starts where it is set
    environment.set_environment(config.device, local_rank=config.local_rank)
    if config.device == "cpu":
        synchronise = functools.partial(launchers.synchronise_on_cpus, world_size=config.world_size)
        after_import("accelerate.state", synchronise)
    install_text_bars()
    after_import("memory_profiler", environment.keep_children)
    after_import("torch._dynamo.trace_rules", dynamo_rules.skip_axon_nb_code)
    launch = functools.partial(launchers.call_on_ranks, world_size=config.world_size)
    after_import("accelerate.launchers", launch)
    for name in launchers.LIGHTNING_LAUNCHERS:
        after_import(name, launchers.call_on_rank)
    after_import("ignite.distributed.comp_models.native", launchers.attach_ignite)
    after_import("transformers.distributed.tensor_parallel", _compare_inputs)
    after_import("transformers.generation.utils", _keep_caches)
    after_import("deepspeed.comm.torch", deepspeed.skip_shm_all_reduce)

    def prepare_engine(module: ModuleType) -> None:
        deepspeed.wrap_step(module, session.steps.after_foreign_step)
        recovery.track_engines()

    after_import("deepspeed.runtime.engine", prepare_engine)
    for name in environment.SURPRISES:
        after_import(name, lambda module: _surprises().prepare(module))
    kind: Any = torch.nn.SyncBatchNorm
    convert = kind.convert_sync_batchnorm  # calls itself for each child

    @functools.wraps(convert)
    def convert_and_look(module: Any, *args: Any, **kwargs: Any) -> Any:
        _surprises().check_conversion(module)
        return convert(module, *args, **kwargs)

    kind.convert_sync_batchnorm = staticmethod(convert_and_look)


def _surprises() -> Any:
    from axon_nb.compat import surprises  # only ranks that may meet one need it

    _hints()
    return surprises


def _hints() -> Any:
    from axon_nb.compat import hints
    from axon_nb.engine.frames import cell_line

    hints.where = lambda: (current().cell, cell_line())
    return hints


def _compare_inputs(tensor_parallel: ModuleType) -> None:
    from axon_nb.compat import transformers  # only ranks that split a model need it
    from axon_nb.engine.frames import cell_line

    transformers.compare_inputs(tensor_parallel, where=cell_line)


def _keep_caches(utils: ModuleType) -> None:
    from axon_nb.compat import transformers  # only ranks that may generate need it

    transformers.keep_caches(utils)


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
    for ask in (dist.get_process_group_ranks, dist.get_global_rank):
        vars(dist)[ask.__name__] = _ask_of_member(ask)


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


def _ask_of_member(original: Callable[..., Any]) -> Callable[..., Any]:
    """Say so when a rank asks for the ranks of a group that it is not in: torch knows them of the last such group."""

    @functools.wraps(original)
    def ask(group: Any, *args: Any, **kwargs: Any) -> Any:
        if group == dist.GroupMember.NON_GROUP_MEMBER:
            _hints().tell(
                f"{original.__name__}{{place}} was asked of a group without this rank, and torch answers for the last "
                "group of others that was created: keep the list of ranks that you passed to new_group."
            )
        return original(group, *args, **kwargs)

    return ask


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
