"""Figures of NCCL ranks: start, collectives, the price of the fence, recovery. `make gpu-report` runs it on GPUs.

python -m benchmarks.gpu --out FILE             # one rank per GPU
python -m benchmarks.gpu --out FILE --cpu 2     # the same cells on two CPU ranks
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import time
from pathlib import Path
from typing import Any

import axon_nb

__all__ = ["main", "measure"]

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
_FINISH = """
import time
def finish():
    if device.type == "cuda":
        torch.cuda.synchronize()
"""


def measure(ranks: int | None = None, *, cpu: bool = False) -> dict[str, Any]:
    """Return the figures by name; of rank 0, unless they say otherwise.

    Args:
        ranks: Number of ranks; None: one per GPU.
        cpu: Whether the ranks use CPUs.
    """
    found: dict[str, Any] = {}
    began = time.perf_counter()
    where: dict[str, Any] = {"devices": "cpu", "backend": "gloo"} if cpu else {"backend": "nccl"}
    cluster = axon_nb.start(ranks, **where)
    try:
        found["start_s"] = round(time.perf_counter() - began, 2)
        cluster.run(_FINISH + _COLLECTIVES + _STEPS)
        for megabytes in (1, 16) if cpu else (1, 64, 256):
            name = f"all_reduce of {megabytes} MiB, GB per second on the bus"
            found[name] = _first(cluster, f"bandwidth({megabytes})")
        # Alternate, because GPU clocks change while they warm up.
        pairs = [(_first(cluster, "step_ms(True)"), _first(cluster, "step_ms(False)")) for _ in range(3)]
        found["step of a small DDP model with the fence, ms"] = min(with_fence for with_fence, _ in pairs)
        found["the same without it, ms"] = min(without for _, without in pairs)
        found["from a failing cell to the next result, s"] = [_recovery(cluster) for _ in range(3)]
    finally:
        cluster.stop()
    return found


def _first(cluster: Any, code: str) -> Any:
    return cluster.run(code)[0]


def _recovery(cluster: Any) -> float:
    began = time.perf_counter()
    with contextlib.suppress(axon_nb.CellError):
        cluster.run("if rank == 0:\n    raise ValueError('as planned')\ndist.all_reduce(torch.ones(1, device=device))")
    total = "t = torch.ones(1, device=device); dist.all_reduce(t)\nt.item()"
    if _first(cluster, total) != cluster.world_size:
        raise RuntimeError("the sum after the failed cell is wrong")
    return round(time.perf_counter() - began, 2)


def main(argv: list[str] | None = None) -> int:
    """Write the figures as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--cpu", type=int, metavar="RANKS", help="use CPU ranks")
    options = parser.parse_args(argv)
    figures = measure(options.cpu, cpu=options.cpu is not None)
    options.out.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
