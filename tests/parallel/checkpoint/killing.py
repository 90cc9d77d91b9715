"""Two ranks that save repeatedly and are killed at a chosen moment: their n-th access to the folder.

``python -m tests.parallel.checkpoint.killing FOLDER ROUNDS SEED`` prints a line of JSON per round. Ranks are forked
from one process that has torch loaded, so a round takes about a second.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import FileStore
from torch.distributed.fsdp import fully_shard

from axon_nb.parallel.checkpoint import Checkpoints

_SIZE, _SAVES = 2, 4
_TOUCHES = (150, 40)
"""About as many accesses as four saves make on each rank."""


@dataclass(frozen=True)
class Round:
    """Outcome of one round."""

    resumed: int
    """Step from which both ranks resumed; -1 if none."""
    bad: str
    """What was wrong with it; empty if nothing."""
    victim: int
    touch: str
    """What the rank was about to do when it was killed; empty if it finished its saves."""
    whole: int
    """Checkpoints in the folder afterwards."""


def _kill_at(touch: int, folder: str, reported: int) -> None:
    left = touch

    def look(event: str, arguments: Any) -> None:
        nonlocal left
        if not (event == "open" or event.startswith(("os.", "shutil."))):
            return
        if not any(isinstance(item, str | os.PathLike) and os.fspath(item).startswith(folder) for item in arguments):
            return
        left -= 1
        if left == 0:
            os.write(reported, event.encode())
            os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(look)


def _fill(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(step)
    for state in optimizer.state.values():
        state["momentum_buffer"].fill_(step)


def _wrong(model: nn.Module, optimizer: torch.optim.Optimizer, step: int, extra: Any) -> str:
    values = {float(v) for p in model.parameters() for v in p.detach().to_local().unique()}  # type: ignore[attr-defined]
    values |= {float(v) for s in optimizer.state.values() for v in s["momentum_buffer"].to_local().unique()}
    return "" if values == {float(step)} and extra == [step] else f"step {step} has {sorted(values)} and extra {extra}"


def _rank(rank: int, folder: str, store: str, *, touch: int, reported: int, answer: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=FileStore(store, _SIZE), rank=rank, world_size=_SIZE)
    model: Any = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 3))
    fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0, momentum=0.5)
    model(torch.ones(1, 64)).sum().backward()
    optimizer.step()
    checkpoints = Checkpoints(folder, keep=2)
    resumed = checkpoints.load_latest(model=model, optimizer=optimizer)
    first = resumed.step if resumed else -1
    bad = _wrong(model, optimizer, first, resumed.extra) if resumed else ""
    os.write(answer, json.dumps([first, bad]).encode())
    # Both have said what they resumed from before one is killed: its end takes the other one along.
    dist.barrier()
    if touch:
        _kill_at(touch, folder, reported)
    for step in range(first + 1, first + 1 + _SAVES):
        _fill(model, optimizer, step)
        save = checkpoints.async_save if step % 2 else checkpoints.save
        save(step, model=model, optimizer=optimizer, extra=[step])
    checkpoints.wait()


def _fork(rank: int, folder: str, store: str, **options: Any) -> int:
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        _rank(rank, folder, store, **options)
        code = 0
    except RuntimeError:
        code = 2  # the other one was killed
    finally:
        os._exit(code)


def _round(number: int, folder: str, generator: random.Random) -> Round:
    victim = generator.randrange(_SIZE)
    touch = generator.randrange(1, _TOUCHES[victim]) if number else 0
    store = f"{folder}.store_{number}"
    report_out, report_in = os.pipe()
    answers = [os.pipe() for _ in range(_SIZE)]
    children = [
        _fork(rank, folder, store, touch=touch * (rank == victim), reported=report_in, answer=answers[rank][1])
        for rank in range(_SIZE)
    ]
    os.close(report_in)
    try:
        ended, status = os.wait()
        if status:  # no signal of the other's handlers: it is gone as a machine is that loses power
            for child in children:
                if child != ended:
                    os.kill(child, signal.SIGKILL)
    finally:
        os.waitpid(next(child for child in children if child != ended), 0)
    read = []
    for out, into in answers:
        os.close(into)
        read.append(json.loads(os.read(out, 4096) or "null"))
        os.close(out)
    event = os.read(report_out, 100).decode()
    os.close(report_out)
    Path(store).unlink(missing_ok=True)
    bad = next((item[1] for item in read if item and item[1]), "")
    if None in read:
        bad = bad or f"a rank could not resume (status {status})"
    resumed = next((item[0] for item in read if item), -2)
    return Round(resumed, bad, victim, event, len(Checkpoints(folder).steps()))


def _main(folder: str, rounds: int, seed: int) -> None:
    generator = random.Random(seed)
    for number in range(rounds + 1):
        print(json.dumps(asdict(_round(number, folder, generator))), flush=True)


if __name__ == "__main__":
    _main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
