"""Real processes that form a Gloo world, or one over shared memory, and run functions as ranks, repeatedly."""

from __future__ import annotations

import os
import pickle
import secrets
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from types import TracebackType
from typing import Any

import cloudpickle
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore

from axon_nb.comm import World
from axon_nb.comm.shared_memory.group import register

__all__ = ["GlooWorld"]

_LIMIT_S = 240.0
"""The first call imports its modules on all ranks at once; no test measures speed."""
_KEY = "AXON_NB_TEST_KEY"
_BACKEND = os.environ.get("AXON_NB_TEST_BACKEND", "gloo")
"""`shm`: whatever runs on such worlds runs over shared memory."""


class GlooWorld:
    """`run(fn)` like `World.mock(n).run(fn)`, with one process per rank."""

    def __init__(self, n: int, *, limit_s: float = _LIMIT_S, backend: str = _BACKEND) -> None:
        self.size, self._limit_s, self.backend = n, limit_s, backend
        self._folder = tempfile.TemporaryDirectory()
        key = secrets.token_bytes(16)
        with Listener(f"{self._folder.name}/socket", "AF_UNIX", backlog=n, authkey=key) as listener:
            self._processes = [
                subprocess.Popen(
                    [sys.executable, "-m", "tests.comm.gloo", str(rank), str(n), self._folder.name, backend],
                    cwd=Path(__file__).resolve().parents[2],
                    env={**os.environ, _KEY: key.hex()},
                )
                for rank in range(n)
            ]
            pipes = [listener.accept() for _ in range(n)]
        self._pipes: list[Connection] = [
            pipe for _, pipe in sorted(((pipe.recv(), pipe) for pipe in pipes), key=lambda item: item[0])
        ]

    def run(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Any]:
        """Run `function(world, *args, **kwargs)` on every rank; raise the failure of the lowest rank, if any."""
        task = cloudpickle.dumps((function, args, kwargs))
        for pipe in self._pipes:
            pipe.send_bytes(task)
        answers = []
        for rank, pipe in enumerate(self._pipes):
            assert pipe.poll(self._limit_s), f"rank {rank} has not answered in {self._limit_s:.0f} s"
            answers.append(pickle.loads(pipe.recv_bytes()))
        for kind, value in answers:
            if kind == "raised":
                raise value
        return [value for _, value in answers]

    def __enter__(self) -> GlooWorld:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self._folder.cleanup()


def _serve(rank: int, size: int, folder: str, backend: str) -> None:
    pipe = Client(f"{folder}/socket", "AF_UNIX", authkey=bytes.fromhex(os.environ[_KEY]))
    pipe.send(rank)
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    register()
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


if __name__ == "__main__":
    _serve(int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:])
