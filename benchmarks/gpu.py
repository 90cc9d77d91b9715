"""Figures of NCCL ranks: collectives, the price of the fence, a step next to torchrun's, push and pull, recovery.

Prints each figure as a line of JSON when it is there; `scripts/gpu_box.py` runs it on GPUs.

python -m benchmarks.gpu                # one rank per GPU; two CPU ranks if there is none
python -m benchmarks.gpu --only fence
"""

from __future__ import annotations

import argparse
import contextlib
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

import axon_nb
from axon_nb import plan
from axon_nb.host.resources import list_gpus

_FINISH = """
import time
def finish():
    if device.type == "cuda":
        torch.cuda.synchronize()
"""
_COLLECTIVES = """
def bandwidth(megabytes, repeats=20):
    tensor = torch.ones(megabytes << 18, device=device)
    for _ in range(3):
        dist.all_reduce(tensor)
    finish()
    start = time.perf_counter()
    for _ in range(repeats):
        dist.all_reduce(tensor)
    finish()
    seconds = (time.perf_counter() - start) / repeats
    return round(tensor.nbytes * 2 * (world_size - 1) / world_size / seconds / 1e9, 3)
"""
_STEPS = """
from torch.optim.optimizer import _global_optimizer_pre_hooks as hooks
def step_ms(fenced, steps=50):
    saved = dict(hooks)
    if not fenced:
        hooks.clear()
    try:
        torch.manual_seed(0)
        model = torch.nn.Sequential(*(torch.nn.Linear(256, 256) for _ in range(8))).to(device)
        model = torch.nn.parallel.DistributedDataParallel(model)
        optimizer = torch.optim.AdamW(model.parameters())
        x = torch.randn(32, 256, device=device)
        for number in range(steps + 10):
            if number == 10:
                finish()
                start = time.perf_counter()
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        finish()
        return round((time.perf_counter() - start) / steps * 1e3, 3)
    finally:
        hooks.update(saved)
"""
_TORCHRUN = """
import os
import torch
import torch.distributed as dist
local = int(os.environ["LOCAL_RANK"])
cuda = torch.cuda.is_available()
device = torch.device("cuda", local) if cuda else torch.device("cpu")
if cuda:
    torch.cuda.set_device(device)
dist.init_process_group("nccl" if cuda else "gloo")
times = [step_ms(True) for _ in range(3)]
if dist.get_rank() == 0:
    print("ms", min(times))
dist.destroy_process_group()
"""


@contextlib.contextmanager
def _cluster() -> Iterator[Any]:
    gpus = list_gpus()
    where: dict[str, Any] = {"backend": "nccl"} if gpus else {"devices": "cpu", "backend": "gloo"}
    cluster = axon_nb.start(len(gpus) or 2, **where)
    try:
        cluster.run(_FINISH + _COLLECTIVES + _STEPS)
        yield cluster
    finally:
        cluster.stop()


def _note(name: str, value: Any) -> None:
    print(json.dumps({name: value}), flush=True)


def _collectives() -> None:
    began = time.perf_counter()
    with _cluster() as cluster:
        _note("start, s", round(time.perf_counter() - began, 2))
        if len(list_gpus()) == 1:
            return  # nothing is on a bus
        for megabytes in (1, 64, 256) if list_gpus() else (1, 16):
            name = f"all_reduce of {megabytes} MiB, GB per second on the bus"
            _note(name, cluster.run(f"bandwidth({megabytes})")[0])


def _fence() -> None:
    with _cluster() as cluster:
        # Alternate, because GPU clocks change while they warm up.
        pairs = [(cluster.run("step_ms(True)")[0], cluster.run("step_ms(False)")[0]) for _ in range(3)]
    _note("step of a small DDP model with the fence, ms", min(with_fence for with_fence, _ in pairs))
    _note("the same without it, ms", min(without for _, without in pairs))


def _torchrun() -> None:
    with _cluster() as cluster:
        _note("step of a small DDP model in a cell, ms", min(cluster.run("step_ms(True)")[0] for _ in range(3)))
        ranks = cluster.world_size
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / "steps.py"
        script.write_text(_FINISH + _STEPS + _TORCHRUN, encoding="utf-8")
        command = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={ranks}"]
        command += ["--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0", "--local-addr=127.0.0.1", str(script)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    if done.returncode:
        raise RuntimeError(f"torchrun failed: {done.stderr[-1000:]}")
    _note("the same under torchrun, ms", float(done.stdout.split("ms ")[1].split()[0]))


def _transfer() -> None:
    with _cluster() as cluster:
        for megabytes in (1, 256):
            array = np.ones(megabytes << 18, np.float32)
            seconds = _median(lambda array=array: cluster.push({"pushed": array}, ranks=[0]))
            _note(f"push of {megabytes} MiB to rank 0, ms", seconds)
            cluster.run(f"made = torch.ones({megabytes << 18}, device=device);", quiet=True)
            _note(f"pull of a tensor of {megabytes} MiB, ms", _median(lambda: cluster.pull("made", ranks=0)))


def _median(call: Callable[[], Any]) -> float:
    times = []
    for _ in range(5):
        began = time.perf_counter()
        call()
        times.append(time.perf_counter() - began)
    return round(sorted(times)[2] * 1e3, 2)


def _recovery() -> None:
    with _cluster() as cluster:
        _note("from a failing cell to the next result, s", [_fail_and_go_on(cluster) for _ in range(3)])


def _fail_and_go_on(cluster: Any) -> float:
    began = time.perf_counter()
    with contextlib.suppress(axon_nb.CellError):
        cluster.run("if rank == 0:\n    raise ValueError('as planned')\ndist.all_reduce(torch.ones(1, device=device))")
    total = "t = torch.ones(1, device=device); dist.all_reduce(t)\nt.item()"
    if cluster.run(total)[0] != cluster.world_size:
        raise RuntimeError("the sum after the failed cell is wrong")
    return round(time.perf_counter() - began, 2)


def _calibrate() -> None:
    with _cluster() as cluster:
        _note("calibration", repr(plan.calibrate(cluster=cluster)).splitlines())


FIGURES: dict[str, Callable[[], None]] = {
    "collectives": _collectives,
    "fence": _fence,
    "torchrun": _torchrun,
    "transfer": _transfer,
    "recovery": _recovery,
    "calibrate": _calibrate,
}
"""What is measured, by the name that `--only` takes."""


def main(argv: list[str] | None = None) -> int:
    """Print the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=list(FIGURES))
    options = parser.parse_args(argv)
    for name in [options.only] if options.only else FIGURES:
        FIGURES[name]()
    return 0


if __name__ == "__main__":
    sys.exit(main())
