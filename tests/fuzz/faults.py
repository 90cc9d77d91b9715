"""The faults: what each does to a cell, when the user interrupts, and how the cell must end."""

from __future__ import annotations

import dataclasses
import random
import re
from collections.abc import Callable

from tests.fuzz import interference, losses, mistakes, tampering
from tests.fuzz.fault import COLLECTIVES, NAMES, STOPPED, Fault

STAYS = ("sleep", "multiply", "recv", "barrier", "loader", "spin", "await", "swallow")
POINTS = ("before", "forward", "after forward", "backward", "before optimizer")
DEATHS = {
    "kill": r"was killed by SIGKILL",
    "leave": r"exited with code 3",
    "segfault": r"was killed by SIGSEGV",
}
_INTERRUPTED = r"KeyboardInterrupt"


def _failing(rng: random.Random, *, action: str, point: str, name: str | None, after: int, message: str) -> list[str]:
    fault = {"point": point, "object": name, "after": after, "action": action, "message": message}
    return [f"if rank == {rng.randrange(4)}: plan.update({fault!r}, clock=CLOCK)"]


def _rank(lines: list[str]) -> int:
    found = re.match(r"if rank == (\d)", lines[0])
    assert found, lines
    return int(found[1])


def _in_training(rng: random.Random, message: str, action: str) -> tuple[list[str], str, tuple[str, ...]]:
    names = tuple(rng.sample(NAMES, rng.randint(1, len(NAMES))))
    victim = rng.choice(names)
    point = rng.choice([p for p in POINTS if p != "after forward" or victim not in ("pipeline", "interleaved")])
    lines = _failing(rng, action=action, point=point, name=victim, after=rng.randint(0, 3), message=message)
    return [*lines, f"train({list(names)!r}, 12)"], f"{victim} {point}", names


def _in_collective(rng: random.Random, message: str, action: str) -> tuple[list[str], str, tuple[str, ...]]:
    name = rng.choice(COLLECTIVES)
    lines = _failing(rng, action=action, point="collective", name=None, after=rng.randint(0, 5), message=message)
    return [*lines, f"collect({name!r}, 12)"], name, ()


def _fails(rng: random.Random, message: str, action: str) -> tuple[list[str], str, tuple[str, ...]]:
    return (_in_training if rng.random() < 0.6 else _in_collective)(rng, message, action)


def _raise(rng: random.Random, message: str) -> Fault:
    lines, detail, names = _fails(rng, message, "raise")
    says = rf"(?s)^\[rank {_rank(lines)}\].*ValueError: {message}"
    return Fault("raise", detail, "\n".join(lines), ("CellError",), says, names=names)


def _swallow(rng: random.Random, message: str) -> Fault:
    lines, detail, names = _fails(rng, message, "raise")
    caught = rng.choice(["except Exception", "except BaseException", "except"])
    own = _rank(lines)
    body = [
        lines[0],
        f"for _ in range({rng.randint(2, 4)}):",
        f"    try:\n        {lines[1]}",
        f"    {caught}:\n        if rank == {own}: raise",
    ]
    return Fault("swallow", f"{caught} around {detail}", "\n".join(body), ("CellError",), message, names=names)


def _die(rng: random.Random, message: str) -> Fault:
    action = rng.choice(list(DEATHS))
    lines, detail, names = _fails(rng, message, action)
    says = rf"rank {_rank(lines)} {DEATHS[action]}"
    return Fault(
        "death", f"{action} in {detail}", "\n".join(lines), ("CellError",), says, dies=(_rank(lines),), names=names
    )


def _two_interrupts(rng: random.Random, message: str) -> Fault:
    once = _interrupt(rng, message)
    moments = (*once.interrupts, rng.uniform(0, 0.4))
    return dataclasses.replace(once, kind="two interrupts", interrupts=moments)


def _interrupt(rng: random.Random, message: str) -> Fault:
    moments = (rng.uniform(0, 0.8),)
    names: tuple[str, ...] = ()
    if rng.random() < 0.6:
        names = tuple(rng.sample(NAMES, rng.randint(1, len(NAMES))))
        code, detail = f"train({list(names)!r}, None)", "training"
    elif rng.random() < 0.3:
        detail = rng.choice([name for name in COLLECTIVES if name != "new_group"])  # else hundreds of groups
        code = f"collect({detail!r}, 10**9)"
    else:
        detail = rng.choice(STAYS)
        code = {"spin": "while True: pass", "await": "import asyncio\nawait asyncio.sleep(600)"}.get(
            detail, f"stay({detail!r})"
        )
    return Fault(
        "interrupt", detail, code, STOPPED,
        _INTERRUPTED, moments, names=names,
    )  # fmt: skip


def _raise_and_interrupt(rng: random.Random, message: str) -> Fault:
    raised = _raise(rng, message)
    says = f"{message}|{_INTERRUPTED}"
    ends = ("CellError", *STOPPED)
    moments = (rng.uniform(0, 0.3),)
    return Fault("raise and interrupt", raised.detail, raised.code, ends, says, moments, names=raised.names)


def _deadlock(rng: random.Random, message: str) -> Fault:
    odd = rng.randrange(4)
    detail, code, says = rng.choice(
        [
            ("skipped", f"for i in range(4):\n    if not (rank == {odd} and i == 2): dist.barrier()", r"waits? in"),
            ("finished", f"if rank != {odd}: dist.all_reduce(torch.ones(9))", rf"for rank {odd}, which has finished"),
            ("not sent", f"if rank == {odd}: dist.recv(torch.ones(9), {(odd + 1) % 4})", r"waits in recv"),
            (
                "mismatch",
                f"dist.barrier() if rank == {odd} else dist.all_reduce(torch.ones(1))",
                r"Collective mismatch",
            ),
            ("ring of recv", "dist.recv(torch.ones(1), (rank + 1) % 4)", r"waits in recv"),
            (
                "opposite order",
                "for g in [pair, None][:: -1 if rank else 1]:\n    if g is None or rank < 2: dist.barrier(group=g)",
                r"waits? in barrier",
            ),
        ]
    )
    return Fault("deadlock", detail, code, ("CellError",), says)


Table = dict[str, tuple[Callable[[random.Random, str], Fault], float]]
KINDS: Table = {
    "raise": (_raise, 0.38),
    "interrupt": (_interrupt, 0.22),
    "two interrupts": (_two_interrupts, 0.08),
    "raise and interrupt": (_raise_and_interrupt, 0.06),
    "swallow": (_swallow, 0.08),
    "deadlock": (_deadlock, 0.12),
    "death": (_die, 0.06),
    "wrong shape": (mistakes.wrong_shape, 0.06),
    "default group": (mistakes.default_group, 0.05),
    "flood": (mistakes.flood, 0.05),
    "memory limit": (mistakes.memory_limit, 0.05),
    "replaced": (tampering.replaced, 0.08),
    "odd exception": (tampering.odd_exception, 0.06),
    "limit": (tampering.limit, 0.04),
    "skipped call": (tampering.skipped_call, 0.06),
    "strangers": (interference.strangers(_raise), 0.03),
    "stopped process": (interference.stopped_process, 0.03),
    "kill during a repair": (interference.kill_during_repair(_die), 0.02),
    "kernel killed": (losses.kernel, 0.03),
    "agent killed": (losses.agent, 0.02),
    "controller killed": (losses.controller, 0.02),
}
"""The kinds, and how often each is chosen, beside the others."""
LOSSES = tuple(kind for kind in KINDS if kind.endswith(" killed"))
"""The kinds after which a process has to be started again."""
ADVERSARY = (
    "replaced",
    "odd exception",
    "limit",
    "skipped call",
    "strangers",
    "stopped process",
    "kill during a repair",
)
"""The kinds of docs/faults.md."""


def make_fault(seed: int, number: int, kinds: tuple[str, ...] = (), *, table: Table = KINDS) -> Fault:
    """Fault `number` of the run with this seed: always the same.

    Args:
        seed: Of the run.
        number: Of the round.
        kinds: Choose among these alone; empty: among all.
        table: All kinds.
    """
    rng = random.Random(f"{seed}:{number}")
    chosen = list(kinds or table)
    (kind,) = rng.choices(chosen, [table[name][1] for name in chosen])
    return table[kind][0](rng, f"bug of round {number}")
