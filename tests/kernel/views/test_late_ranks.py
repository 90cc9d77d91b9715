"""A rank that does not answer delays no view: it is named or left out, and returns with the next answer."""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Iterator

import pytest

from tests.kernel.cells.labelled import ranks_of
from tests.support.browser.page_messages import CLOSE_PANELS
from tests.support.kernel import FreshCluster, Kernel
from tests.support.processes import footprint, until

LATE = 2
RANKS_OF_CELL = (
    "t_frame = axon_nb.show.timeline().to_frame()\nt_frame = t_frame[t_frame.kind == 'cell']\n"
    "print(sorted(set(t_frame[t_frame.name == {!r}]['rank'])))"
)
"""The ranks of which the timeline has a cell."""


@pytest.fixture(scope="module")
def ranks(shared_kernel: Kernel) -> Iterator[tuple[int, ...]]:
    """The processes of 4 ranks."""
    shared_kernel.ok("import axon_nb")
    yield footprint(shared_kernel).ranks
    shared_kernel.ok(CLOSE_PANELS)


def shown(kernel: Kernel, command: str) -> str:
    """The words of what a command shows, without those of panels that are open and follow each cell."""
    kernel.ok(CLOSE_PANELS)
    reply = kernel.ok(command)
    return "\n".join([reply.stdout, reply.result, *(bundle.get("text/plain", "") for bundle in reply.displays)])


VIEWS = {
    "%watch": (rf"^  rank {LATE}: does not reply$", rf"^  rank {LATE}: idle;"),
    "%distributed status": (rf"^ +{LATE} .* does not reply ", rf"^ +{LATE} .* idle "),
    "%distributed stacks": (r"^\[ranks? \S+\] does not reply: it is in C code", r"^\[ranks? \S+\] idle$"),
}
"""The line about rank 2 while it does not answer, and then; `stacks` puts equal lines of several ranks together."""


@pytest.mark.parametrize("command", VIEWS)
def test_unresponsive_rank_is_named_until_it_replies(
    shared_kernel: Kernel, ranks: tuple[int, ...], command: str
) -> None:
    late, there = VIEWS[command]
    said = [""]

    def says(pattern: str) -> bool:
        # Only of rank 2: a busy machine may make another rank late, too.
        said[0] = shown(shared_kernel, command)
        lines = [line for line in said[0].splitlines() if re.search(pattern, line)]
        return any(not line.startswith("[") or LATE in ranks_of(line) for line in lines)

    os.kill(ranks[LATE], signal.SIGSTOP)
    try:
        # The first look says it already, and later ones have less time: one that is silent for long is disconnected.
        assert until(lambda: says(late), timeout=25), said
    finally:
        os.kill(ranks[LATE], signal.SIGCONT)
    assert until(lambda: says(there)), said


def test_spans_of_an_unresponsive_rank_arrive_later(shared_kernel: Kernel, ranks: tuple[int, ...]) -> None:
    shared_kernel.ok(CLOSE_PANELS)  # one that is open would fetch the spans before they are asked for
    shared_kernel.ok("%%distributed --quiet\ndist.barrier()")
    name = f"In [{shared_kernel.value('len(In)') - 2}]"
    command = RANKS_OF_CELL.format(name)

    def ranks_of_it() -> set[int]:
        return set(json.loads(shared_kernel.ok(command).stdout))

    os.kill(ranks[LATE], signal.SIGSTOP)
    try:
        # Not of all others: a busy machine may make another rank late, too.
        assert until(lambda: (found := ranks_of_it()) and LATE not in found, timeout=25)
    finally:
        os.kill(ranks[LATE], signal.SIGCONT)
    assert until(lambda: ranks_of_it() == {*range(4)})


@pytest.mark.slow
@pytest.mark.parametrize("command", ["%memory layer", "%shards layer"])
def test_model_views_name_an_unresponsive_rank(fresh_cluster: FreshCluster, command: str) -> None:
    """They wait for 10 s, and do so several times, as a rank may have to look through a large model."""
    kernel = fresh_cluster(3)
    kernel.ok("%%distributed --quiet\nlayer = torch.nn.Linear(4, 2)")
    late = footprint(kernel).ranks[1]
    os.kill(late, signal.SIGSTOP)
    try:
        assert "Rank 1 did not reply." in shown(kernel, command)
    finally:
        os.kill(late, signal.SIGCONT)
    assert until(lambda: "not reply" not in shown(kernel, command))
    kernel.ok(CLOSE_PANELS)
