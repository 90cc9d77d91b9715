"""Interrupts cells at random moments, and checks what must hold after each."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence

from tests.support.kernel import Kernel, Reply

LIMIT_S = 100.0
"""Seconds within which an interrupted cell must be over."""
STOPPED = ("CellInterrupt", "KeyboardInterrupt")


def interrupt_at_random(
    kernel: Kernel, cells: Sequence[str], *, seed: int, rounds: int, within_s: float, again: float = 0.3
) -> list[str]:
    """Send endless cells, and interrupt once or, with the chance `again`, twice; what went wrong, one line a round."""
    rng = random.Random(seed)
    wrong = []
    for number in range(rounds):
        cell = rng.choice(cells)
        moments = [rng.uniform(0, within_s)]
        if rng.random() < again:
            moments.append(rng.choice([rng.uniform(0, 0.05), rng.uniform(0, 0.5)]))
        request = kernel.submit(cell)
        for moment in moments:
            time.sleep(moment)  # the moment of the interrupt is what is tested
            kernel.interrupt()
        reported = f"round {number}, interrupted after {', '.join(f'{1000 * m:.1f}' for m in moments)} ms in {cell!r}"
        try:
            reply = kernel.collect(request, timeout=LIMIT_S)
        except TimeoutError as error:
            wrong.append(f"{reported}: not over after {LIMIT_S:.0f} s: {error}")
            kernel.interrupt()
            reply = kernel.collect(request, timeout=LIMIT_S)
        kernel.settle()  # an interrupt just before a cell is sent may be noticed just after
        own = ("CancelledError",) if cell.startswith("import asyncio") else ()  # ipykernel's way to end an async cell
        if reply.ename not in (*STOPPED, *own):
            wrong.append(f"{reported}: {reply.status} {reply.ename}\n{reply.stdout}\n{reply.traceback}")
        if problem := check_next_cell(kernel):
            wrong.append(f"{reported}: {problem}")
    return wrong


def check_next_cell(kernel: Kernel) -> str:
    """What is wrong with the cell after an interrupt: each rank must be free, and all must meet."""
    reply: Reply = kernel.run("%%distributed\nt = torch.ones(1)\ndist.all_reduce(t)\nt.item() == world_size")
    if not reply.ok or {line.partition("] ")[2] for line in reply.lines()} != {"True"}:
        return f"the next cell: {reply.status} {reply.stdout} {reply.traceback}"
    return ""
