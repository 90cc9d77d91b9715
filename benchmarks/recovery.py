"""Time to regain control after a fault, in a real kernel with 4 ranks: `make bench`."""

from __future__ import annotations

import argparse
import os
import signal
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from benchmarks.report import Row, median, percentile, write
from tests.support.kernel import Kernel

_TIMEOUT_S = 30.0
SETUP = """%%distributed
import os, time
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

def strike():
    with open(CLOCK + ".new", "w") as file:
        file.write(str(time.time()))
    os.replace(CLOCK + ".new", CLOCK)
    raise ValueError("as planned")

class Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()
    @staticmethod
    def backward(ctx, gradient):
        if rank == 2:
            strike()
        return gradient

def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))

ddp = nn.parallel.DistributedDataParallel(net())
fsdp = fully_shard(net())
x = torch.randn(8, 64)
for model in (ddp, fsdp):
    model(x).sum().backward()
"""
RAISES = {
    "all_reduce": "if rank == 2: strike()\ndist.all_reduce(torch.ones(1000))",
    "barrier": "if rank == 2: strike()\ndist.barrier()",
    "send and recv": "if rank == 2: strike()\ndist.send(torch.ones(1 << 20), rank + 1) if rank % 2 == 0 else "
    "dist.recv(torch.empty(1 << 20), rank - 1)",
    "new_group": "if rank == 2: strike()\ndist.new_group([0, 1, 2, 3])",
    "backward of DDP": "Fails.apply(ddp(Fails.apply(x.requires_grad_()))).sum().backward()",
    "all-gather of FSDP2": "if rank == 2: strike()\nfsdp(x)",
}
INTERRUPTS = {
    "a Python loop": "while True: pass",
    "time.sleep": "time.sleep(600)",
    "a stuck collective": "dist.barrier() if rank else time.sleep(600)",
    "training with DDP": "while True: ddp(x).sum().backward()",
    "training with FSDP2": "while True: fsdp(x).sum().backward()",
    "a DataLoader loop": "data = torch.utils.data.TensorDataset(torch.ones(64, 4))\n"
    "while True:\n    for _ in torch.utils.data.DataLoader(data, batch_size=2): pass",
    "await": "import asyncio\nawait asyncio.sleep(600)",
}
DEADLOCKS = {
    "different collectives": "dist.barrier() if rank == 1 else dist.all_reduce(torch.ones(1))",
    "a rank that has finished": "if rank != 3: dist.all_reduce(torch.ones(9))",
    "a ring of recv": "dist.recv(torch.ones(1), (rank + 1) % 4)",
    "different sizes": "dist.all_reduce(torch.ones(2 + rank))",
}


class Faults:
    """Injects faults into a kernel with 4 ranks.

    Args:
        kernel: A kernel with the extension loaded and a cluster started.
        clock: File in which a rank writes the time when it fails.
    """

    def __init__(self, kernel: Kernel, clock: Path) -> None:
        self.kernel = kernel
        self.clock = clock

    def raised(self, code: str) -> float:
        """Seconds from an exception on rank 2 to the end of the cell."""
        self.clock.unlink(missing_ok=True)
        reply = self.kernel.run(f"%%distributed\n{code}", timeout=_TIMEOUT_S)
        end = time.time()
        assert "as planned" in reply.traceback, reply.traceback
        return end - float(self.clock.read_text())

    def interrupted(self, code: str) -> float:
        """Seconds from the stop button to the end of the cell."""
        request = self.kernel.submit(f"%%distributed\nif rank == 0: print('go', flush=True)\n{code}")
        self.kernel.wait_for_output(request, "go")
        time.sleep(0.3)  # until the cell is in the code to interrupt
        begin = time.time()
        self.kernel.interrupt()
        reply = self.kernel.collect(request, timeout=_TIMEOUT_S)
        assert reply.ename == "CellInterrupt", reply.traceback
        return time.time() - begin

    def locked(self, code: str) -> float:
        """Seconds that a cell takes that deadlocks at once."""
        begin = time.time()
        reply = self.kernel.run(f"%%distributed\n{code}", timeout=_TIMEOUT_S)
        assert not reply.ok
        return time.time() - begin

    def killed(self) -> tuple[float, float]:
        """Seconds from SIGKILL of rank 3 in a barrier to the end of the cell, and of the repair."""
        pid = int(self.kernel.ok("%%rank 3\nimport os, time\nos.getpid()").lines()[0].split()[-1])
        request = self.kernel.submit(
            "%%distributed\nif rank == 0: print('go', flush=True)\ndist.barrier() if rank else time.sleep(600)"
        )
        self.kernel.wait_for_output(request, "go")
        begin = time.time()
        os.kill(pid, signal.SIGKILL)  # a process of this kernel's own cluster
        reply = self.kernel.collect(request, timeout=_TIMEOUT_S)
        reported = time.time() - begin
        assert "SIGKILL" in reply.traceback, reply.traceback
        begin = time.time()
        self.kernel.ok("%distributed repair", timeout=_TIMEOUT_S)
        return reported, time.time() - begin

    def attached(self) -> float:
        """Seconds of `%distributed attach` after a restart of the kernel while a cell ran."""
        request = self.kernel.submit("%%distributed\nimport time\nif rank == 0: print('go', flush=True)\ntime.sleep(8)")
        self.kernel.wait_for_output(request, "go")
        self.kernel.come_back()
        self.kernel.ok("%load_ext axon_nb")
        begin = time.time()
        request = self.kernel.submit("%distributed attach")
        self.kernel.wait_for_output(request, "go")
        seconds = time.time() - begin
        self.kernel.collect(request, timeout=_TIMEOUT_S)
        return seconds


def rows_of(name: str, seconds: list[float], *, most: float | None = None, middle: float | None = None) -> list[Row]:
    """Rows for median and maximum, each with its target in seconds."""
    note = f"{len(seconds)} times, 95 % within {percentile(seconds, 95):.3f} s"
    return [
        Row(f"{name}: median", median(seconds), "s", limit=middle, note=note),
        Row(f"{name}: longest", max(seconds), "s", limit=most),
    ]


def _repeat(call: Callable[[], float], times: int) -> list[float]:
    return [call() for _ in range(times)]


def measure(faults: Faults, *, times: int) -> list[Row]:
    """Measure all rows."""
    rows: list[Row] = []
    for name, code in RAISES.items():
        seconds = _repeat(lambda code=code: faults.raised(code), times)  # type: ignore[misc]
        rows += rows_of(f"a rank raises, others in {name}", seconds, most=0.5, middle=0.1)
    for name, code in INTERRUPTS.items():
        seconds = _repeat(lambda code=code: faults.interrupted(code), times)  # type: ignore[misc]
        rows += rows_of(f"stop button in {name}", seconds, most=0.5)
    for name, code in DEADLOCKS.items():
        seconds = _repeat(lambda code=code: faults.locked(code), times)  # type: ignore[misc]
        rows += rows_of(f"deadlock: {name}", seconds, most=2.0)
    rounds = max(2, times // 4)
    deaths = [faults.killed() for _ in range(rounds)]
    rows += rows_of("SIGKILL in a barrier, reported", [reported for reported, _ in deaths], most=0.2)
    rows += rows_of("`%distributed repair`", [repaired for _, repaired in deaths], most=1.0)
    rows += rows_of("`%distributed attach` to a running cell", _repeat(faults.attached, rounds), most=0.5)
    return rows


def main() -> None:
    """Measure, print the table and write it to benchmarks/results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="few faults, as a smoke test")
    parser.add_argument("--times", type=int, default=20, help="number of faults of each kind")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, Kernel() as kernel:
        clock = Path(folder) / "clock"
        kernel.ok("%load_ext axon_nb\n%distributed start -n 4 --devices cpu", timeout=_TIMEOUT_S)
        kernel.ok(SETUP.replace("import os, time", f"import os, time\nCLOCK = {str(clock)!r}"))
        rows = measure(Faults(kernel, clock), times=2 if options.quick else options.times)
        kernel.ok("%distributed stop")
    print(write("recovery", rows, options.out))


if __name__ == "__main__":
    main()
