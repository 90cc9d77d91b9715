"""A rank that does not answer delays no view: it is named or left out, and returns with the next answer."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator

import pytest

from tests.support.browser.page_messages import CLOSE_PANELS
from tests.support.kernel import FreshCluster, Kernel
from tests.support.processes import footprint, until

LATE = 2
LAST_CELL = (
    "t_frame = axon_nb.show.timeline().to_frame()\nt_frame = t_frame[t_frame.kind == 'cell']\n"
    "print(sorted(set(t_frame[t_frame.name == t_frame.name.iloc[-1]]['rank'])))"
)
"""The ranks of which the timeline has the last cell."""


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
    "%watch": (f"  rank {LATE}: does not reply", f"  rank {LATE}: idle"),
    "%distributed status": ("does not reply", ""),
    "%distributed stacks": ("does not reply: it is in C code that holds the GIL", ""),
}
"""What each says while rank 2 does not answer, and then."""


@pytest.mark.parametrize("command", VIEWS)
def test_a_rank_that_does_not_answer_is_named_and_comes_back(
    shared_kernel: Kernel, ranks: tuple[int, ...], command: str
) -> None:
    late, there = VIEWS[command]
    said = [""]

    def says(words: str, *, any_late: bool) -> bool:
        said[0] = shown(shared_kernel, command)
        return words in said[0] and ("not reply" in said[0]) == any_late

    os.kill(ranks[LATE], signal.SIGSTOP)
    try:
        # A busy machine may make another rank late, too; one that is silent for long is disconnected.
        assert until(lambda: says(late, any_late=True), timeout=25), said
    finally:
        os.kill(ranks[LATE], signal.SIGCONT)
    assert until(lambda: says(there, any_late=False)), said


def test_spans_of_a_rank_that_does_not_answer_come_the_next_time(shared_kernel: Kernel, ranks: tuple[int, ...]) -> None:
    shared_kernel.ok("%%distributed --quiet\ndist.barrier()")
    os.kill(ranks[LATE], signal.SIGSTOP)
    try:
        # A busy machine may make another rank late, too.
        assert until(lambda: LATE not in json.loads(shared_kernel.ok(LAST_CELL).stdout), timeout=25)
    finally:
        os.kill(ranks[LATE], signal.SIGCONT)
    assert until(lambda: shared_kernel.ok(LAST_CELL).lines() == [str([*range(4)])])


@pytest.mark.slow
@pytest.mark.parametrize("command", ["%memory layer", "%shards layer"])
def test_views_of_models_name_a_rank_that_does_not_answer(fresh_cluster: FreshCluster, command: str) -> None:
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
