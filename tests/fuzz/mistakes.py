"""Mistakes in a cell that must cost nothing but the cell: wrong shapes, the wrong group, too much output or memory."""

from __future__ import annotations

import random

from tests.fuzz.fault import NAMES, Fault

_SHAPES = {
    "all_reduce": "dist.all_reduce(torch.ones(SIZE + 4 * (rank == ODD)))",
    "all_reduce of other types": "dist.all_reduce(torch.ones(SIZE, dtype=torch.float64 if rank == ODD else None))",
    "broadcast": "dist.broadcast(torch.ones(SIZE + (rank == ODD)), 0)",
    "broadcast from two roots": "dist.broadcast(torch.ones(SIZE), int(rank == ODD))",
    "all_gather": "dist.all_gather([torch.ones(own) for _ in range(4)], torch.ones(own))",
    "reduce_scatter": "dist.reduce_scatter(torch.ones(own), [torch.ones(own)] * 4)",
    "all_to_all": "dist.all_to_all_single(torch.ones(4 * own), torch.ones(4 * own))",
    "gather": "dist.gather(torch.ones(own), [torch.ones(SIZE)] * 4 if rank == 0 else None)",
    "scatter": "dist.scatter(torch.ones(own), [torch.ones(SIZE)] * 4 if rank == 0 else None)",
    "send": (
        "if rank == ODD: dist.send(torch.ones(SIZE + 4), (ODD + 1) % 4)\n"
        "elif rank == (ODD + 1) % 4: dist.recv(torch.ones(SIZE), ODD)"
    ),
}
_MISUSED = {
    "barrier": "dist.barrier()",
    "all_reduce": "dist.all_reduce(torch.ones(99))",
    "all_gather_object": "dist.all_gather_object([None] * 4, rank)",
    "broadcast": "dist.broadcast(torch.ones(99), 0)",
    "functional": "functional.all_reduce(torch.ones(9), 'sum', dist.group.WORLD) + 1",
    "training": "train(['ddp'], 2)",
}
_FLOODS = {
    "lines": "for i in range(60_000): print('line', i, 'x' * 60)",
    "one line": "print('x' * 30_000_000)",
    "stderr": "for i in range(60_000): sys.stderr.write(f'line {i} of what went wrong, and more words of it\\n')",
    "a child process": "os.system('yes some words of a child process that never ends | head -c 4000000')",
    "a progress bar": "for i in range(60_000): sys.stderr.write(f'\\rstep {i} ' + '#' * 60)",
    "displays": "from IPython.display import HTML, display\nfor i in range(400): display(HTML('x' * 100_000))",
}
MOST_TEXT, MOST_DISPLAYED = 5_000_000, 34_000_000
"""Characters of text and of displays that a flooded cell may show; its ranks write 40 to 160 MB."""


def _steps(rng: random.Random) -> tuple[str, tuple[str, ...]]:
    """Some steps before the mistake, or none."""
    names = tuple(rng.sample(NAMES, rng.randint(0, 2)))
    return f"train({list(names)!r}, 2)\n" if names else "", names


def wrong_shape(rng: random.Random, message: str) -> Fault:
    """One rank passes another size, type or root than the others."""
    what, odd = rng.choice(list(_SHAPES)), rng.randrange(1, 4)
    size = rng.choice([4, 400, 400_000])
    steps, names = _steps(rng)
    own = f"own = {size} + 4 * (rank == {odd})\n"
    call = _SHAPES[what].replace("SIZE", str(size)).replace("ODD", str(odd))
    says = r"(?s)at line \d+: rank.*rank|sends .* bytes, but rank"
    return Fault("wrong shape", f"{what} of {size}", steps + own + call, ("CellError",), says, names=names)


def default_group(rng: random.Random, message: str) -> Fault:
    """Some ranks use the group of all."""
    ranks = sorted(rng.sample(range(4), rng.randint(1, 3)))
    what = rng.choice(list(_MISUSED))
    options = f"--ranks {','.join(map(str, ranks))}"
    fix = "Use `group=subgroup`" if len(ranks) > 1 else "Run the cell on all ranks"
    # DDP's C++ code calls it: nothing can refuse that before it waits.
    says = "which do(es)? not run this cell" if what == "training" else rf"(?s)do(es)? not run this cell.*{fix}"
    return Fault("default group", f"{what} with {options}", _MISUSED[what], ("CellError",), says, options=options)


def flood(rng: random.Random, message: str) -> Fault:
    """Ranks print far more than a cell shows, then one of them fails, as the others wait for it."""
    what, odd = rng.choice(list(_FLOODS)), rng.randrange(4)
    who = rng.choice(["True", f"rank == {odd}", f"rank != {odd}"])
    body = "\n".join(f"    {line}" for line in _FLOODS[what].splitlines())
    code = f"import os, sys\nif {who}:\n{body}\nif rank == {odd}: raise ValueError({message!r})\ndist.barrier()"
    return Fault("flood", f"{what} if {who}", code, ("CellError",), rf"(?s)^\[rank {odd}\].*ValueError: {message}")


def memory_limit(rng: random.Random, message: str) -> Fault:
    """A rank has no more memory to get, in tensors or objects, as the others wait for it."""
    what, odd = rng.choice(["tensors", "bytes", "gradients"]), rng.randrange(4)
    steps, names = _steps(rng)
    code = f"{steps}if rank == {odd}: fill({what!r})\ndist.barrier()"
    says = rf"(?s)^\[rank {odd}\].*(MemoryError|can't allocate memory)"
    return Fault("memory limit", what, code, ("CellError",), says, names=names)
