"""`%timeline` in a notebook, late ranks in it, and advice on what it shows."""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.kernel.cells.labelled import ranks_of
from tests.support.browser.notebook_page import CLOSE_PANELS
from tests.support.kernel import FreshCluster, Kernel
from tests.support.processes import footprint, until

TRAIN = """%%distributed
import torch.nn as nn
torch.manual_seed(0)
net = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 8)))
optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
def train(steps):
    for _ in range(steps):
        optimizer.zero_grad()
        net(torch.randn(16, 64)).sum().backward()
        optimizer.step()
train(1)"""
PIPELINE = """%%distributed
from axon_nb.parallel import Pipeline
torch.manual_seed(0)
parts = [nn.Sequential(nn.Linear(32, 32), nn.Tanh()) for _ in range(world_size)]
pipe = Pipeline(parts, num_microbatches=8, schedule="1F1B", loss=nn.functional.mse_loss)
for _ in range(3):
    _ = pipe.step(torch.randn(16, 32), torch.randn(16, 32))"""
OTHERS = """%%distributed
import torch.nn as nn
from axon_nb.parallel import Pipeline
def other(ranks, schedule, num_stages, num_microbatches):
    group = dist.new_group(ranks) if len(ranks) < world_size else None
    if rank in ranks:
        stages = [nn.Linear(8, 8) for _ in range(num_stages)]
        loss = nn.functional.mse_loss
        pipe = Pipeline(stages, group=group, num_microbatches=num_microbatches, schedule=schedule, loss=loss)
        x = torch.randn(2 * num_microbatches, 8)
        pipe.step(x, x)
        pipe(x)
for pair in ([0, 1], [2, 3], [0, 3], [1, 2], [0, 2]):
    other(pair, '1F1B', 2, 2)
other(range(4), 'Interleaved1F1B', 8, 4)
other(range(4), 'GPipe', 4, 16)"""
"""Pipelines of other groups, and of the same one, whose spans are there already."""
HOOKS = """%%distributed
from torch.nn.modules import module as torch_modules
from axon_nb.records.hooks import missing_hooks
is_wrapped = hasattr(torch.autograd.backward, '__wrapped__')
print(len(torch_modules._global_forward_pre_hooks), is_wrapped, missing_hooks("inspection.backward_spans"))"""

LATE = 2
RANKS_OF_CELL = (
    "t_frame = axon_nb.show.timeline().to_frame()\nt_frame = t_frame[t_frame.kind == 'cell']\n"
    "print(sorted(set(t_frame[t_frame.name == {!r}]['rank'])))"
)
"""The ranks of which the timeline has a cell."""

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
    shared_kernel.ok(OTHERS, timeout=120)
    shared_kernel.ok(TRAIN)
    shared_kernel.ok("import axon_nb, json")
    yield shared_kernel
    shared_kernel.ok(CLOSE_PANELS)


def counts(kernel: Kernel, extra: str = "") -> dict[str, int]:
    """Spans of the last cell on rank 0, by kind."""
    kernel.ok(
        "t_frame = axon_nb.show.timeline().to_frame()\n"
        "t_last = t_frame[t_frame.kind == 'cell'].name.iloc[-1]\n"
        "t_start = t_frame[(t_frame.name == t_last)].start.min()\n"
        f"t_own = t_frame[(t_frame['rank'] == 0) & (t_frame.start >= t_start){extra}]"
    )
    return dict(json.loads(kernel.value("json.dumps({k: int(v) for k, v in t_own.kind.value_counts().items()})")))


def has_recorded(kernel: Kernel, code: str, extra: str = "", /, **expected: int) -> bool:
    """Whether the spans of a cell, run until it is so, are these many on rank 0.

    On a busy machine a rank may be asked too late to record a cell, or answer too late to be shown at once.
    """

    def recorded() -> bool:
        kernel.ok(code)
        return counts(kernel, extra).items() >= expected.items()

    return until(recorded)


def test_recording_starts_when_a_timeline_opens(ready: Kernel) -> None:
    reply = ready.ok("%timeline")
    kinds = [set(bundle) for bundle in reply.displays]
    assert "application/vnd.jupyter.widget-view+json" in kinds[0]
    assert kinds[1] == {"text/html", "text/plain"}
    assert has_recorded(ready, "%%distributed\ntrain(4)", forward=4, backward=4, optimizer=4, cell=1), counts(ready)
    assert counts(ready)["collective"] >= 4
    names = ready.value("sorted(set(t_own.name) - {t_last})")
    assert {"Sequential", "backward", "SGD", "all_reduce"} <= set(names)
    assert ready.value("int(t_own[t_own.kind == 'collective'].bytes.max())") == 4 * (64 * 64 + 64 + 64 * 8 + 8)
    assert ready.value("int(t_own[t_own.kind == 'collective'].waited_for.notna().sum())") >= 4
    assert ready.value("set(t_own[t_own.kind == 'collective'].line.dropna()) == {2}")


def test_panel_is_saved_as_picture_after_each_cell(ready: Kernel) -> None:
    ready.ok("%timeline")

    # The update goes to where the panel is; its message belongs to the cell that brought it about.
    def updated() -> dict[str, Any]:
        return ready.ok("%%distributed\ntrain(3)").displays[-1]

    assert updated()["text/html"].startswith("<details open ")
    assert "data:image/svg+xml;base64," in updated()["text/html"]
    assert until(lambda: "rank 3: forward" in updated()["text/plain"])
    assert ready.ok("1").displays == []


def test_error_in_forward_is_unchanged(ready: Kernel) -> None:
    ready.ok("%timeline")
    ready.ok(
        "%%distributed\nclass Bad(nn.Module):\n    def forward(self, x):\n        raise ValueError('mine')\nbad = Bad()"
    )
    reply = ready.run("%%distributed\nbad(torch.ones(1))")
    assert "ValueError: mine" in reply.traceback
    assert "step_spans" not in reply.traceback
    reply = ready.run("%%distributed\n(torch.ones(1, requires_grad=True) * 1).sum().backward(torch.ones(3))")
    assert "RuntimeError" in reply.traceback
    assert has_recorded(ready, "%%distributed\ntrain(2)", forward=2), counts(ready)
    # Caught within one cell, and copied before the hook is gone: the model is as it was.
    caught = (
        "%%distributed\nimport copy, pickle\nnest = nn.Sequential(nn.Linear(2, 2), bad)\n"
        "for _ in range(3):\n"
        "    try:\n        nest(torch.ones(2))\n"
        "    except ValueError:\n"
        "        copied = copy.deepcopy(nest[0]), pickle.loads(pickle.dumps(nest[0]))\n"
        "        copy.deepcopy(nest)\n"
        "    nest[0](torch.ones(2))\n"
        "assert not nest._forward_hooks and not nest[0]._forward_hooks"
    )
    assert has_recorded(ready, caught, forward=6), counts(ready)


def test_pipeline_is_compared_with_its_ideal_on_ranks(ready: Kernel) -> None:
    ready.ok("%timeline")
    of_stages = " & (t_frame.stage >= 0)"
    assert has_recorded(ready, PIPELINE, of_stages, forward=24, backward=24), counts(ready, of_stages)
    assert counts(ready, of_stages)["wait"] > 0
    wanted = "pipeline of ranks 0-3, 4 stages, 8 microbatches: the last step took"
    text = ready.ok("print(repr(axon_nb.show.timeline()))").stdout
    sentence = next((line for line in text.splitlines() if wanted in line), "")
    assert "ideal: " in sentence, text
    assert "27%" in sentence, text  # (P - 1) / (M + P - 1) = 3 / 11
    assert ready.value("int((t_frame[t_frame.kind == 'p2p'].stage.notna()).sum())") == 0
    # Each message once: forwards and backwards over 3 borders, both ends, in 3 steps; and what ranks agree on first.
    messages = "int((t_frame[(t_frame.kind == 'p2p') & (t_frame.start >= t_start)].bytes == 4 * 2 * 32).sum())"
    assert until(lambda: counts(ready) and ready.value(messages) == 3 * 8 * 2 * 3 * 2), ready.value(messages)
    # Before the first step the stage is called once, to learn the shapes.
    of_none = "list(t_own[t_own.kind.isin(['forward', 'backward']) & t_own.stage.isna()].name)"
    assert ready.value(of_none) == ["Sequential"]


def test_timeline_is_saved_as_trace_page_and_table(ready: Kernel, tmp_path: Path) -> None:
    ready.ok("%%distributed\ntrain(2)")
    for ending in ("json", "html", "csv", "svg"):
        reply = ready.ok(f"%timeline --save {tmp_path}/spans.{ending}")
        assert reply.lines() == [f"Saved the timeline as {tmp_path}/spans.{ending}."]
    events: list[dict[str, Any]] = json.loads((tmp_path / "spans.json").read_text())["traceEvents"]
    assert {event["pid"] for event in events} == {0, 1, 2, 3}
    assert min(event["ts"] for event in events if event["ph"] == "X") == 0
    assert "<script type=" in (tmp_path / "spans.html").read_text()
    assert ">rank 3</text>" in (tmp_path / "spans.svg").read_text()
    assert (tmp_path / "spans.csv").read_text().startswith("rank,kind,name,group,start,seconds,bytes")


def test_timeline_of_one_cell_and_some_ranks(ready: Kernel, tmp_path: Path) -> None:
    ready.ok("%%distributed\ntrain(1)")
    assert until(lambda: counts(ready) and ready.value("int((t_frame.name == t_last).sum())") == 4)
    number = ready.value("int(t_last[4:-1])")
    reply = ready.ok(f"%timeline --cell {number} --ranks 1,2")
    assert reply.displays[0]["text/plain"].splitlines()[0].startswith(f"Timeline, In [{number}], 2 ranks, ")
    both = ready.ok(f"%timeline --cell {number},{number} --ranks 1,2").displays[0]["text/plain"].splitlines()
    assert both[0] == f"In [{number}] compared with In [{number}]"
    assert any(line.split()[0] == "cell" and line.endswith("(+0%)") for line in both[1:])
    ready.ok(f"%timeline --cell {number} --ranks 2 --save {tmp_path}/one.csv")
    assert {line.split(",")[0] for line in (tmp_path / "one.csv").read_text().splitlines()[1:]} == {"2"}


def test_closed_view_leaves_no_hooks_in_torch(ready: Kernel) -> None:
    ready.ok("%timeline")
    assert until(lambda: ready.ok(HOOKS).lines()[0].startswith("[ranks 0-3] 1 True []"))
    ready.ok(CLOSE_PANELS)
    wait = (
        "%%distributed\nimport time\nfrom torch.nn.modules import module as torch_modules\n"
        "t_end = time.monotonic() + 60\n"
        "while torch_modules._global_forward_pre_hooks and time.monotonic() < t_end:\n    time.sleep(0.05)"
    )
    ready.ok(wait)
    assert ready.ok(HOOKS).lines() == ["[ranks 0-3] 0 False []"]
    ready.ok("%%distributed\ntrain(1)")


def test_watched_cell_has_a_picture_of_its_timeline(ready: Kernel) -> None:
    def shown(kind: str) -> str:
        return ready.ok("%%distributed --watch\ntrain(3)").displays[2][kind].partition("Timeline, ")[2]

    assert shown("text/plain").startswith("In [")
    assert "data:image/svg+xml;base64," in shown("text/html")
    assert until(lambda: "forward" in shown("text/plain").splitlines()[1])
    assert ready.ok("%%distributed\n'goes on'").lines() == ["[ranks 0-3] 'goes on'"]


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


@pytest.fixture(scope="module")
def ready_for_advice(shared_kernel: Kernel) -> Iterator[Kernel]:
    shared_kernel.ok(DEFINE)
    yield shared_kernel
    shared_kernel.ok(CLOSE_PANELS)


def advice(kernel: Kernel) -> tuple[str, str]:
    """As text and as HTML."""
    bundle = kernel.ok("%timeline --advise").displays[-1]
    return bundle["text/plain"], bundle["text/html"]


@pytest.mark.parametrize("cell", PLANTED)
def test_planted_cost_is_named_first(ready_for_advice: Kernel, cell: str) -> None:
    ready_for_advice.ok("%timeline")
    shown: list[tuple[str, str]] = []

    def is_named() -> bool:  # a rank that is asked too late records too little
        ready_for_advice.ok(f"%%distributed\n{cell}")
        shown.append(advice(ready_for_advice))
        first = shown[-1][0].splitlines()[1]
        return first.startswith("  1. ") and PLANTED[cell] in first

    assert until(is_named, timeout=120), shown[-1]
    text, html = shown[-1]
    assert text.startswith("Advice on the last 4 steps of In [")
    assert "less then." in text
    assert PLANTED[cell] in html


def test_advice_without_a_step_says_what_to_do(ready_for_advice: Kernel) -> None:
    ready_for_advice.ok("%%distributed\nnumber = 1")
    cell = ready_for_advice.value("len(get_ipython().history_manager.input_hist_parsed) - 2")
    reply = ready_for_advice.run(f"%timeline --advise --cell {cell}")
    assert "no training step is recorded. Open `%timeline`, run a cell" in reply.evalue
