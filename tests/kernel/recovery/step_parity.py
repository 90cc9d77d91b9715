"""Checks that ranks are at the same training step, and rebuilds models where they are not; ranks have run `PLACE`."""

from __future__ import annotations

from typing import Any

from tests.kernel.recovery.trained_model import SETUP
from tests.support.kernel import Kernel, Reply

PLACE = """%%distributed
def place():
    own = torch.cat([p.data.flatten() for p in ddp.module.parameters()])
    others = [torch.zeros_like(own) for _ in range(world_size)]
    dist.all_gather(others, own)
    equal = all(torch.equal(own, other) for other in others)
    states = [next(iter(optimizer.state.values()))["step"] for optimizer in (ddp_optimizer, sharded_optimizer)]
    return equal, *map(int, states)
"""


def place_everywhere(kernel: Kernel) -> set[Any]:
    """What `place` says, by rank: one value when all are at the same."""
    kernel.ok("%%distributed --out places\nplace()")
    return set(kernel.value("places.values").values())


def begin_together(kernel: Kernel, reply: Reply | None = None) -> None:
    """Rebuild models and optimizers if `reply` says that ranks are a step apart, or an earlier test left them so.

    Ranks that were apart have other weights afterwards, also when they have made as many steps again.
    """
    if step_differences(reply) if reply else not are_together(place_everywhere(kernel)):
        kernel.ok(SETUP)


def are_together(places: set[Any]) -> bool:
    """Whether all ranks have made the same steps, and have the same weights."""
    return len(places) == 1 and bool(next(iter(places))[0])


def step_differences(reply: Reply) -> list[str]:
    """The lines by which a cell says that ranks are a step apart."""
    return [line for line in reply.lines() if " at step " in line]
