"""Real processes that form a world over shared memory, or over Gloo, and run functions as ranks, repeatedly.

They are forked from a process that has imported torch: the fork server of multiprocessing, one per worker of the tests.
"""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import pickle
import secrets
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Client, Connection, Listener
from multiprocessing.connection import wait as wait_for_any
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from types import TracebackType
from typing import Any

import cloudpickle
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore
from torch.utils._pytree import tree_map_only

from axon_nb.comm import World
from axon_nb.comm.shared_memory.group import register

_LIMIT_S = 240.0
"""The first call imports its modules on all ranks at once; no test measures speed."""
_AFTER_FAILURE_S = 20.0
"""How long the other ranks may take when one has failed: they may wait for it, and hide why it failed."""
_IDLE_S = 20.0
"""Worlds that were not used for so long end: each process takes 250 MB, and each of its Gloo groups polls."""
_ROOT = Path(__file__).resolve().parents[2]
_PRELOADED = [
    "tests.support.ranks",
    "axon_nb.parallel",
    "numpy",
    "pytest",
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "torch.distributed.pipelining",
    "torch.distributed.tensor.parallel",
]
_BACKEND = os.environ.get("AXON_NB_TEST_BACKEND", "shm")
"""What users get on the CPUs of one host; `gloo`: whatever runs on such worlds runs over Gloo."""


_running: set[RankWorld] = set()


def end_idle_worlds() -> None:
    """End the processes of worlds that were not used for a while; the next `run` starts new ones."""
    for world in list(_running):
        if time.monotonic() - world.used > _IDLE_S:
            world.end()


def forked(function: Callable[..., None], *args: Any, **environ: str) -> ForkServerProcess:
    """Run a function of a module in a process that is forked with torch, and has this one's environment and more."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOADED)
    process = context.Process(target=_with_environment, args=({**os.environ, **environ}, function, *args))
    process.start()
    return process


def run_code(code: str, *arguments: str, limit_s: float = 150.0) -> subprocess.CompletedProcess[str]:
    """Run a program as `python -c` does, in a process that is forked with torch: to import it takes seconds."""
    with tempfile.TemporaryDirectory() as folder:
        process = forked(_execute, code, arguments, folder)
        process.join(limit_s)
        process.kill()
        process.join()
        out, err = (Path(folder, name).read_text(encoding="utf-8") for name in ("out", "err"))
    return subprocess.CompletedProcess(["-c", *arguments], process.exitcode or 0, out, err)


def _execute(code: str, arguments: tuple[str, ...], folder: str) -> None:
    for number, name in enumerate(("out", "err"), 1):
        with Path(folder, name).open("w", encoding="utf-8") as file:
            os.dup2(file.fileno(), number)
    sys.argv = ["-c", *arguments]
    exec(compile(code, "<string>", "exec"), {"__name__": "__main__"})


def _with_environment(environ: dict[str, str], function: Callable[..., None], *args: Any) -> None:
    os.environ.clear()  # of the fork server, which may have started before a test changed a variable
    os.environ.update(environ)
    os.chdir(_ROOT)
    torch.set_num_threads(1)
    function(*args)


class RankWorld:
    """`run(fn)` like `World.mock(n).run(fn)`, with one process per rank, from the first `run` on."""

    def __init__(self, n: int, *, limit_s: float = _LIMIT_S, backend: str = _BACKEND) -> None:
        self.size, self._limit_s, self.backend = n, limit_s, backend
        self._processes: list[ForkServerProcess] = []
        self._pipes: list[Connection] = []
        self.used = time.monotonic()
        """When `run` was called last."""

    def _start(self) -> None:
        n, key = self.size, secrets.token_bytes(16)
        self._folder = tempfile.TemporaryDirectory()
        with Listener(f"{self._folder.name}/socket", "AF_UNIX", backlog=n, authkey=key) as listener:
            self._processes = [forked(_serve, rank, n, self._folder.name, self.backend, key) for rank in range(n)]
            pipes = [listener.accept() for _ in range(n)]
        self._pipes = [pipe for _, pipe in sorted(((pipe.recv(), pipe) for pipe in pipes), key=lambda item: item[0])]
        _running.add(self)

    def begin(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        """Have every rank call `function(world, *args, **kwargs)`."""
        if not self._processes:
            self._start()
        task = cloudpickle.dumps((function, args, kwargs))
        for pipe in self._pipes:
            pipe.send_bytes(task)

    def answer(self, rank: int, *, limit_s: float = 120.0) -> Any:
        """Return what a rank's call returned, or raise what it raised."""
        assert self._pipes[rank].poll(limit_s)
        kind, value = pickle.loads(self._pipes[rank].recv_bytes())
        if kind == "raised":
            raise value
        return value

    def run(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Any]:
        """Run `function(world, *args, **kwargs)` on every rank; raise the failure of the lowest rank, if any.

        Ranks that do not answer write their stacks to stderr, and are replaced, so that the next test can run.
        """
        self.used = time.monotonic()
        self.begin(function, *args, **kwargs)
        answers: dict[int, tuple[str, Any]] = {}
        limit = time.monotonic() + self._limit_s
        while len(answers) < self.size and (seconds := limit - time.monotonic()) > 0:
            try:
                ready = wait_for_any([pipe for rank, pipe in enumerate(self._pipes) if rank not in answers], seconds)
            except BaseException:  # the test's own timeout
                self._kill([rank for rank in range(self.size) if rank not in answers])
                raise
            for rank in [rank for rank, pipe in enumerate(self._pipes) if pipe in ready]:
                try:
                    answers[rank] = pickle.loads(self._pipes[rank].recv_bytes())
                except EOFError:
                    answers[rank] = ("raised", AssertionError(f"rank {rank} has died"))
                if answers[rank][0] == "raised":
                    limit = min(limit, time.monotonic() + _AFTER_FAILURE_S)
        missing = [rank for rank in range(self.size) if rank not in answers]
        failures = [value for _, (kind, value) in sorted(answers.items()) if kind == "raised"]
        if missing or any(not process.is_alive() for process in self._processes):
            self._kill(missing)
        self.used = time.monotonic()
        if failures:
            raise failures[0]
        assert not missing, f"ranks {missing} have not answered in {self._limit_s:.0f} s; their stacks are on stderr"
        return [answers[rank][1] for rank in range(self.size)]

    def _kill(self, missing: list[int]) -> None:
        for process in (self._processes[rank] for rank in missing):
            if process.is_alive() and process.pid is not None:
                os.kill(process.pid, signal.SIGUSR1)
        time.sleep(0.5)  # to write their stacks; nothing says when they have
        for process in self._processes:
            process.kill()
        self.end()

    def end(self) -> None:
        """End the processes, if there are any."""
        if self not in _running:
            return
        _running.discard(self)
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.join(60)
            if process.is_alive():
                process.kill()
                process.join()
        self._processes, self._pipes = [], []
        self._folder.cleanup()

    def __enter__(self) -> RankWorld:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end()


class DeviceWorld(RankWorld):
    """Ranks that make their tensors on a device of their own, unless they name one; answers come back on the CPU.

    Args:
        n: Number of ranks.
        device: ``cuda``, where rank r gets GPU r; any other is for the tests of this class.
        backend: As for `RankWorld`.
    """

    def __init__(self, n: int, *, device: str = "cuda", backend: str = "nccl") -> None:
        super().__init__(n, backend=backend)
        self._device = device

    def run(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Any]:
        """Run the function as `RankWorld.run` does."""
        return super().run(_on_device, self._device, function, args, kwargs)


def _on_device(world: World, device: str, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    with torch.device(device):
        return tree_map_only(torch.Tensor, torch.Tensor.cpu, function(world, *args, **kwargs))


def _serve(rank: int, size: int, folder: str, backend: str, key: bytes) -> None:
    pipe = Client(f"{folder}/socket", "AF_UNIX", authkey=key)
    pipe.send(rank)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell ignores it in what it starts in the background
    faulthandler.register(signal.SIGUSR1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    register()
    if backend == "nccl":
        torch.cuda.set_device(rank)
    dist.init_process_group(backend, store=FileStore(f"{folder}/store", size), rank=rank, world_size=size)
    while True:
        try:
            function, args, kwargs = cloudpickle.loads(pipe.recv_bytes())
        except EOFError:
            return
        try:
            answer = ("value", function(World.init(), *args, **kwargs))
        except Exception as error:
            error.add_note("".join(traceback.format_exception(error)))
            answer = ("raised", error)
        pipe.send_bytes(cloudpickle.dumps(answer))
