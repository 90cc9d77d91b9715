"""`%timeline --advise` on real ranks: planted costs are named first, in the notebook and by the view's button."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.browser.page_messages import CLOSE_PANELS
from tests.support.kernel import Kernel
from tests.support.processes import until

DEFINE = """%%distributed
import gc, time
class Examples(torch.utils.data.Dataset):
    def __init__(self, seconds):
        self.seconds = seconds
    def __len__(self):
        return 64
    def __getitem__(self, number):
        time.sleep(self.seconds)
        return torch.ones(16)
def train(seconds, after=lambda: None):
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(16, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    batches = iter(torch.utils.data.DataLoader(Examples(seconds)))
    for step in range(5):
        model(next(batches)).sum().backward()
        after()
        optimizer.step()
        optimizer.zero_grad()"""
PLANTED = {
    "train(0.2)": "for their DataLoader.",
    "train(0.3 if rank == 2 else 0.0)": "Rank 2 is a straggler: it waits for its data,",
    "train(0.0, lambda: time.sleep(0.3 if rank == 1 else 0.0))": "Rank 1 is a straggler: it runs code of its own,",
}


@pytest.fixture(scope="module")
def ready(shared_kernel: Kernel) -> Iterator[Kernel]:
    shared_kernel.ok(DEFINE)
    yield shared_kernel
    shared_kernel.ok(CLOSE_PANELS)


def advice(kernel: Kernel) -> tuple[str, str]:
    """As text and as HTML."""
    bundle = kernel.ok("%timeline --advise").displays[-1]
    return bundle["text/plain"], bundle["text/html"]


@pytest.mark.parametrize("cell", PLANTED)
def test_planted_cost_is_named_first(ready: Kernel, cell: str) -> None:
    ready.ok("%timeline")
    shown: list[tuple[str, str]] = []

    def is_named() -> bool:  # a rank that is asked too late records too little
        ready.ok(f"%%distributed\n{cell}")
        shown.append(advice(ready))
        first = shown[-1][0].splitlines()[1]
        return first.startswith("  1. ") and PLANTED[cell] in first

    assert until(is_named, timeout=120), shown[-1]
    text, html = shown[-1]
    assert text.startswith("Advice on the last 4 steps of In [")
    assert "less then." in text
    assert PLANTED[cell] in html


def test_advice_without_a_step_says_what_to_do(ready: Kernel) -> None:
    ready.ok("%%distributed\nnumber = 1")
    cell = ready.value("len(get_ipython().history_manager.input_hist_parsed) - 2")
    reply = ready.run(f"%timeline --advise --cell {cell}")
    assert "no training step is recorded. Open `%timeline`, run a cell" in reply.evalue
