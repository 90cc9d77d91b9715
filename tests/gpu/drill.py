"""Each way to end each kind of hang, on two processes: what ends, when, and whether the GPU still works.

    python -m tests.gpu.drill            # NCCL, on this machine's GPUs
    python -m tests.gpu.drill --gloo     # the same processes on CPUs, with Gloo

A hang ends by an *abort* (as when a cell fails), by *destroying* the group from another thread, or by its *timeout*.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from axon_nb.engine.groups import creation, recovery
from axon_nb.engine.groups.creation import init_default_group
from tests.engine.groups.native_ranks import GLOO

LIMIT_S = 40.0
"""Seconds after which a hang counts as one that nothing ended."""
TIMEOUT_S = 15.0
"""Timeout of the groups."""
_PAUSE_S = 2.0
"""Seconds from the start of the hang until it is to end."""
_ROOT = Path(__file__).resolve().parents[2]


def _skips(rank: int, device: torch.device) -> None:
    if rank == 0:
        tensor = torch.ones(1000, device=device)
        dist.all_reduce(tensor)
        tensor.sum().item()


def _receives(rank: int, device: torch.device) -> None:
    if rank == 0:
        tensor = torch.ones(1000, device=device)
        dist.recv(tensor, 1)
        tensor.sum().item()


def _dies(rank: int, device: torch.device) -> None:
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    _skips(rank, device)


def _computes(rank: int, device: torch.device) -> None:
    torch.cuda._sleep(1 << 36)  # cycles: about half a minute
    torch.cuda.synchronize()


KINDS: dict[str, tuple[int, Callable[[int, torch.device], None] | None]] = {
    "a peer does not connect": (1, None),
    "a peer skips a collective": (2, _skips),
    "a receive without a send": (2, _receives),
    "a peer is killed": (2, _dies),
    "a kernel that takes half a minute": (1, _computes),
}
"""GPUs that each kind of hang needs, and how a rank gets into it; None: already while it joins."""
WAYS = ("abort", "destroy", "timeout")


def drill(kinds: Sequence[str], ways: Sequence[str], *, gloo: bool) -> dict[str, dict[str, Any]]:
    """Return what rank 0 reported for each kind and way: ``ended``, ``seconds`` since the way was taken, ``raised``."""
    gpus = 2 if gloo else torch.cuda.device_count()
    found: dict[str, dict[str, Any]] = {}
    for kind in kinds:
        needed = KINDS[kind][0]
        enough = gpus >= needed and not (gloo and KINDS[kind][1] in (None, _computes))
        found[kind] = {
            way: _end(kind, way, gloo=gloo) if enough else {"not run": f"needs {needed} GPUs"} for way in ways
        }
    return found


def _end(kind: str, way: str, *, gloo: bool) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "tests.gpu.drill", "--kind", kind, "--way", way, "--folder", folder]
        command += ["--gloo"] if gloo else []
        ranks = 1 if KINDS[kind][1] in (None, _computes) else 2
        env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(_ROOT), os.environ.get("PYTHONPATH", "")])}
        processes = [subprocess.Popen([*command, "--rank", str(rank)], cwd=_ROOT, env=env) for rank in range(ranks)]
        try:
            code = processes[0].wait(3 * LIMIT_S)  # the hang, and the imports before it
        except subprocess.TimeoutExpired:
            return {"ended": False}
        finally:
            for process in processes:
                process.kill()
                process.wait()
        out = Path(folder) / "out.json"
        if out.exists():
            return dict(json.loads(out.read_text(encoding="utf-8")))
        return {"ended": True, "process": signal.Signals(-code).name if code < 0 else f"exit status {code}"}


def _be_rank(kind: str, way: str, rank: int, folder: Path, *, gloo: bool) -> None:
    """The life of one rank; rank 0 writes what became of the hang."""
    hang = KINDS[kind][1]
    device = torch.device("cpu") if gloo else torch.device("cuda", rank)
    size = 1 if hang is _computes else 2
    store = dist.FileStore(str(folder / "store"), size)
    box: dict[str, Any] = {}
    if hang is None:
        store.set("connect0/0/here1", "1")  # the peer arrives, and never connects
    else:
        _join(rank, size, store, device, gloo=gloo)
    if rank == 0:
        threading.Thread(target=_take, args=(way, box), daemon=True).start()
    try:
        if hang is None:
            _join(rank, size, store, device, gloo=gloo)
        else:
            hang(rank, device)
    except (RuntimeError, KeyboardInterrupt) as error:
        box["raised"] = f"{type(error).__name__}: {str(error).partition(chr(10))[0][:200]}"
    if rank == 0:
        began = box.pop("began", None)
        box |= {"ended": True, "seconds": None if began is None else round(time.monotonic() - began, 1)}
        with contextlib.suppress(RuntimeError):
            box["device works"] = (torch.ones(4, device=device) * 2).sum().item() == 8.0
        (folder / "out.json").write_text(json.dumps(box), encoding="utf-8")
    else:
        time.sleep(3 * LIMIT_S)
    os._exit(0)


def _join(rank: int, size: int, store: Any, device: torch.device, *, gloo: bool) -> None:
    if not gloo:
        creation.set_nccl_environment(one_host=True)
        torch.cuda.set_device(device)
    place: dict[str, Any] = {"store": store, "rank": rank, "world_size": size, "device": device}
    init_default_group("nccl", **place, timeout_s=TIMEOUT_S, recoverable=True, kind=GLOO if gloo else creation.NCCL)
    if size > 1:
        dist.all_reduce(torch.ones(1, device=device))


def _take(way: str, box: dict[str, Any]) -> None:
    """End the hang that the main thread is in."""
    time.sleep(_PAUSE_S)
    box["began"] = time.monotonic()
    if way == "abort":
        recovery.abort(again=False)
    elif way == "destroy" and dist.is_initialized():
        dist.destroy_process_group()


def main(argv: list[str] | None = None) -> int:
    """Print the table as a line of JSON; return 1 if an abort left a hang or ended the process."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gloo", action="store_true")
    parser.add_argument("--kind", choices=list(KINDS))
    parser.add_argument("--way", choices=WAYS)
    parser.add_argument("--rank", type=int)
    parser.add_argument("--folder", type=Path)
    options = parser.parse_args(argv)
    if options.rank is not None:
        _be_rank(options.kind, options.way, options.rank, options.folder, gloo=options.gloo)
    kinds = [options.kind] if options.kind else list(KINDS)
    table = drill(kinds, [options.way] if options.way else WAYS, gloo=options.gloo)
    aborts = {kind: ways.get("abort", {}) for kind, ways in table.items()}
    left = {kind: "an abort did not end it" for kind, end in aborts.items() if end.get("ended") is False}
    left |= {kind: f"a rank ended with {end['process']}" for kind, end in aborts.items() if "process" in end}
    print(json.dumps({"table": table, "failed": left}))
    return 1 if left else 0


if __name__ == "__main__":
    sys.exit(main())
