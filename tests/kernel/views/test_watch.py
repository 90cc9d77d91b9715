"""`%watch` in a notebook: the job's numbers, and trackers that get them, too."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.kernel.recovery.conditions import MEET
from tests.support.browser.notebook_page import CLOSE_PANELS, model_of, send_from_page
from tests.support.kernel import Kernel, Reply
from tests.support.processes import until

SEES = """
import pathlib
from axon_nb.widgets.cell.views import RankStrip
t_add = RankStrip.add
def t_sees(self, states):
    states = list(states)
    t_add(self, states)
    if any(state.call == "barrier" and state.activity.name == "WAITING" for state in states):
        pathlib.Path({path!r}).touch()
RankStrip.add = t_sees"""

ASK = """import json
from msgspec import to_builtins
from axon_nb.cluster.session import current
from axon_nb.cluster.inspection.status import request_job
def t_ask(before={}):
    import time
    end = time.monotonic() + 25
    while time.monotonic() < end:  # a busy rank may answer late
        found = request_job(current.require("test").state, before)
        if len(found.reports) == 4:
            return found
    raise TimeoutError(f"reports of all ranks; the last ones: {found}")
def t_until(reached):
    import time
    end = time.monotonic() + 45
    while time.monotonic() < end:
        found = t_ask()
        if reached(found):
            return found
        time.sleep(0.05)
    raise TimeoutError(found)
def t_rows(found):
    return {rank: [(row.step, dict(row.values)) for row in report.rows] for rank, report in found.reports.items()}"""
MODEL = """%%distributed
from torch import nn
from torch.distributed.fsdp import fully_shard
torch.manual_seed(0)
t_plain = nn.Linear(64, 32)
t_plain_steps = torch.optim.SGD(t_plain.parameters(), momentum=0.9)
t_sharded = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
for layer in t_sharded:
    fully_shard(layer)
_ = fully_shard(t_sharded)
t_steps = torch.optim.Adam(t_sharded.parameters())
for t_model, t_optimizer in ((t_plain, t_plain_steps), (t_sharded, t_steps)):
    t_model(torch.randn(4, 64)).sum().backward()
    t_optimizer.step()"""

TRAIN = """%%distributed
import axon_nb, torch
for step in range(3):
    axon_nb.log(loss=torch.tensor(rank + step / 2), lr=0.1, step=step)
axon_nb.log(accuracy=float("nan"), step=2)
"""


def test_watch_ends_as_a_picture_and_a_table(kernel: Kernel, tmp_path: Path) -> None:
    seen = str(tmp_path / "seen")
    kernel.ok(SEES.format(path=seen))
    code = f"if rank:\n    t_meet({seen!r})\ndist.barrier()"
    reply = kernel.ok(f"%%distributed --watch\n{MEET}{code}")
    kernel.ok("RankStrip.add = t_add")
    (picture,) = (bundle for bundle in reply.displays if "text/html" in bundle)  # not who is waited for
    strip, timeline = picture["text/html"].split("<b>Timeline, ")
    for part in (strip, timeline):
        assert "data:image/svg+xml;base64," in part
        assert "<table" in part
    assert "barrier" in strip + picture["text/plain"].split("Timeline, ")[0]


def test_failing_cell_freezes_its_view(kernel: Kernel) -> None:
    reply = kernel.run(
        "%%distributed --watch\nimport time\ntime.sleep(0.3)\nif rank == 1:\n    raise ValueError('x')\ndist.barrier()"
    )
    assert reply.traceback.startswith("[rank 1]")
    picture = next(bundle for bundle in reply.displays if "axon-picture" in bundle.get("text/html", ""))
    assert "data:image/svg+xml;base64," in picture["text/html"]
    words = picture["text/plain"]
    assert "rank 1: failed after" in words
    assert words.count("stopped in barrier, line 6") == 3, words


def test_closed_view_receives_no_messages(kernel: Kernel) -> None:
    kernel.ok(
        "import axon_nb\nt_client = axon_nb.current_cluster().client\nt_seen = []\n"
        "from axon_nb.records.protocol.inspection import WatchRequest\n"
        "for t_rank in range(4): t_client.request(t_rank, WatchRequest(20, 0)).result(60)"
    )
    senders = "[t for t in threading.enumerate() if t.name == 'axon_nb-telemetry']"  # of cells that were watched
    kernel.ok(f"%%distributed\nimport threading, time\nwhile {senders}: time.sleep(0.01)")
    kernel.ok("t_client.on_telemetry(lambda event: t_seen.append(event.rank))")
    kernel.ok("%%distributed\nimport time\ntime.sleep(0.5)")
    assert kernel.value("t_seen") == []
    kernel.ok("t_client.request(2, WatchRequest(20, 300)).result(60);")
    assert until(lambda: kernel.value("len(t_seen) > 2"))
    assert kernel.value("sorted(set(t_seen))") == [2]
    kernel.ok("t_client.request(2, WatchRequest(20, 0)).result(60);\nt_client.on_telemetry(None)")


def test_result_reopens_its_views(kernel: Kernel) -> None:
    kernel.ok("%%distributed --watch --out t_result\nfor _ in range(3):\n    dist.all_reduce(torch.ones(10))")
    kernel.ok("%%distributed\ndist.barrier()")  # later calls are not part of it
    reply = kernel.ok("t_result.show()")
    assert ["application/vnd.jupyter.widget-view+json" in bundle for bundle in reply.displays] == [True, True, False]
    assert reply.displays[2]["text/html"].count("data:image/svg+xml;base64,") > 4
    text = reply.displays[2]["text/plain"]
    assert "In [" in text.splitlines()[0]
    assert "barrier" not in text
    # Any number of times; not in another process, where there is nothing to show.
    assert len(kernel.ok("t_result.show()").displays) == 3
    kernel.ok("import pickle\nt_other = pickle.loads(pickle.dumps(t_result))")
    assert kernel.value("(t_other == t_result, t_other.seconds == t_result.seconds)") == (True, True)
    kernel.ok("%%distributed --out t_plain\n1")
    for name in ("t_other", "t_plain"):
        refused = kernel.run(f"{name}.show()")
        assert refused.ename == "UsageError"
        assert "No live view was recorded: rerun the cell as `%%distributed --watch --out result`" in refused.traceback


def test_failing_view_does_not_break_the_cell(kernel: Kernel) -> None:
    kernel.ok(
        "from axon_nb.widgets.cell.views import RankStrip\nt_flush, t_start = RankStrip.flush, RankStrip.start\n"
        "def t_broken(*_): raise RuntimeError('t_broken')"
    )
    try:
        for name in ("flush", "start", "finish", "add"):
            kernel.ok(f"t_before = RankStrip.{name}\nRankStrip.{name} = t_broken")
            reply = kernel.run("%%distributed --watch\nimport time\ntime.sleep(0.3)\nrank")
            kernel.ok(f"RankStrip.{name} = t_before")
            assert reply.ok, reply.traceback
            assert "[rank 3] 3" in reply.stdout + str(reply.displays)
    finally:
        kernel.ok("RankStrip.flush, RankStrip.start = t_flush, t_start")


@pytest.fixture(scope="module")
def ready(shared_kernel: Kernel) -> Iterator[Kernel]:
    """A kernel with fresh ranks: nothing has logged metrics or counted steps on them."""
    shared_kernel.ok("%distributed restart", timeout=120)
    shared_kernel.ok(ASK)
    shared_kernel.ok("%%distributed --quiet\nimport axon_nb")
    yield shared_kernel
    shared_kernel.ok(CLOSE_PANELS)


def views(reply: Reply) -> int:
    """How many widgets a cell shows."""
    return sum("application/vnd.jupyter.widget-view+json" in bundle for bundle in reply.displays)


def reported(kernel: Kernel, expression: str) -> Any:
    """A value of the notebook, by JSON."""
    return json.loads(kernel.ok(f"print(json.dumps({expression}))").stdout)


def test_logged_values_are_read_once_in_order(ready: Kernel) -> None:
    ready.ok("t_before = t_ask().reports")
    ready.ok(
        "%%distributed\nimport axon_nb\nfor step in range(3):\n"
        "    axon_nb.log(t_loss=torch.tensor(rank + step / 2), items=8, step=step)\naxon_nb.log(t_loss=float('nan'))"
    )
    ready.ok("t_found = t_ask(t_before)")
    rows = reported(ready, "{rank: rows[:3] for rank, rows in t_rows(t_found).items()}")
    assert rows == {str(r): [[s, {"t_loss": r + s / 2}] for s in range(3)] for r in range(4)}
    assert reported(ready, "[report.steps_per_s > 0 for report in t_found.reports.values()]") == [True] * 4
    assert reported(ready, "[report.items_per_s > 0 for report in t_found.reports.values()]") == [True] * 4
    assert reported(ready, "t_rows(t_ask(t_found.reports))") == {str(rank): [] for rank in range(4)}


def test_bad_numbers_raise_in_the_cell_and_lose_nothing(ready: Kernel) -> None:
    reply = ready.run("%%distributed\nkept = 5\naxon_nb.log(loss=torch.ones(2))")
    assert "loss has shape (2,): log a single number, such as loss.mean()." in reply.traceback
    assert ready.ok("%%rank 0\nkept").lines() == ["[rank 0] 5"]


def test_waiting_ranks_are_reported(ready: Kernel) -> None:
    ready.ok(
        "%%distributed --noblock --out t_job --quiet\nimport time\nimport axon_nb\n"
        "for _ in axon_nb.progress(range(10), desc='t_loop'):\n"
        "    if rank == 1:\n        while not globals().get('t_go'): time.sleep(0.02)\n    dist.barrier()"
    )
    ready.ok(
        "t_waiting = lambda found: (found := found.descriptions)[1].startswith('running line 6') and all(\n"
        "    found[rank].startswith('waiting in barrier at line 7 for rank 1, for') for rank in (0, 2, 3))\n"
        "t_found = t_until(t_waiting)"
    )
    bars = reported(ready, "[to_builtins(report.bars[0]) for report in t_found.reports.values()]")
    assert [(bar["desc"], bar["done"], bar["total"], bar["is_over"]) for bar in bars] == [("t_loop", 0, 10, False)] * 4
    # Waiting ranks communicate all the time.
    ready.ok("_ = t_until(lambda _: (t_ask(t_found.reports).reports[0].communication or 0) > 0.9)")
    ready.ok("t_job.cancel()")
    assert reported(ready, "t_until(lambda found: found.cell is None).cell") is None
    ready.ok("_ = t_job.wait(100)")


def test_card_shows_the_mesh(ready: Kernel) -> None:
    ready.ok("%%distributed\nfrom axon_nb.parallel import make_mesh\nmesh = make_mesh(dp=2, tp=2)\nt_tp = mesh['tp']")
    card = "import axon_nb\naxon_nb.current_cluster()"
    mesh = ["mesh: dp 2 × tp 2", "  dp 0: 0 1", "  dp 1: 2 3"]
    assert until(lambda: ready.ok(card).result.splitlines()[-3:] == mesh)
    ready.ok("%%distributed\nmesh = None\ndel t_tp")


def test_panel_is_a_view_with_a_saved_picture(ready: Kernel) -> None:
    reply = ready.ok("%watch")
    assert views(reply) == 1
    assert any("<details open " in bundle.get("text/html", "") for bundle in reply.displays)
    ready.ok("%%distributed\naxon_nb.log(t_panel=rank + 0.5, step=3)")
    ready.ok("t_panel = current.session().panels['watch',]")
    words = "t_panel: 2 at step 3 (0.5 on rank 0 to 3.5 on rank 3)"
    # It asks after each cell; a busy rank may answer too late.
    assert until(lambda: words in reported(ready, "t_panel.view.to_bundle()['text/plain']"))
    assert "data:image/svg+xml;base64," in reported(ready, "t_panel.view.to_bundle()['text/html']")
    # Opened again, it moves: there is one that follows.
    ready.ok("%watch")
    assert reported(ready, "t_panel.closed") is True
    assert reported(ready, "len([key for key in current.session().panels if key == ('watch',)])") == 1


def test_page_button_aborts_the_cell(ready: Kernel) -> None:
    panel = model_of(ready.ok("%watch"))
    request = ready.submit("%%distributed\nprint('on', flush=True)\nwhile True:\n    dist.all_reduce(torch.ones(1))")
    ready.wait_for_output(request, "on")
    send_from_page(ready, panel, {"op": "stop"})
    reply = ready.collect(request)
    assert reply.ename in ("CellInterrupt", "KeyboardInterrupt")
    assert " stopped." in reply.traceback
    assert ready.ok("%%distributed\nrank").ok


def test_memory_is_measured_by_role_and_estimated_beside(ready: Kernel) -> None:
    ready.ok(MODEL)
    ready.ok(
        "from axon_nb.cluster.inspection.memory import request_memory\n"
        "t_of = lambda *names: request_memory(current.require('test').state, names)\n"
        "t_sizes = lambda uses: {rank: dict(use.by_role) for rank, use in uses.items()}"
    )
    ready.ok("t_memory = t_of('t_plain')")
    own = 4 * (64 * 32 + 32)
    for sizes in reported(ready, "t_sizes(t_memory.measured)").values():
        assert [sizes[role] for role in ("parameters", "gradients", "optimizer")] == [own] * 3
        assert sizes["other"] > 0
    states = ("parameters", "gradients", "optimizer")
    assert reported(ready, "t_sizes(t_memory.estimated)")["3"] == dict.fromkeys(states, own)
    ready.ok("t_memory = t_of('t_sharded', 't_steps')")
    shard = 4 * 2 * (64 * 64 + 64) // 4
    measured, estimated = reported(ready, "t_sizes(t_memory.measured)"), reported(ready, "t_sizes(t_memory.estimated)")
    for rank in map(str, range(4)):
        assert estimated[rank] == {"parameters": shard, "gradients": shard, "optimizer": 2 * shard}
        assert measured[rank]["parameters"] == shard
        assert 2 * shard <= measured[rank]["optimizer"] <= 2 * shard + 64, "Adam counts its steps, too"
    uses = reported(ready, "[to_builtins(use) for use in t_memory.measured.values()]")
    assert {use["source"] for use in uses} == {"storages"}
    assert all(use["resident_peak"] >= use["resident"] > 0 and use["capacity"] > use["resident"] for use in uses)


def test_memory_panel_with_and_without_a_name(ready: Kernel) -> None:
    ready.ok(MODEL)
    reply = ready.ok("%memory t_plain")
    assert views(reply) == 1
    texts = [bundle["text/plain"] for bundle in reply.displays]
    assert any(text.startswith("t_plain: memory of 4 ranks") for text in texts), texts
    texts = [bundle["text/plain"] for bundle in ready.ok("%memory").displays]
    assert any(text.startswith("memory of 4 ranks") for text in texts), texts


def needs(package: str) -> pytest.MarkDecorator:
    """Skip if a package is missing."""
    return pytest.mark.skipif(find_spec(package) is None, reason=f"needs {package}")


@pytest.fixture
def tracking_kernel(shared_kernel: Kernel) -> Iterator[Kernel]:
    yield shared_kernel
    shared_kernel.ok("%distributed config log_to=off")


def scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """The curves of a run of TensorBoard."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events: Any = EventAccumulator(str(folder))
    events.Reload()
    return {name: [(point.step, point.value) for point in events.Scalars(name)] for name in events.Tags()["scalars"]}


@needs("tensorboard")
def test_rank_0_writes_each_training_run_to_tensorboard(tracking_kernel: Kernel, tmp_path: Path) -> None:
    said = tracking_kernel.ok(f"%distributed config log_to=tensorboard:{tmp_path}").stdout
    assert said == f"log_to = tensorboard:{tmp_path} (from the next cell)\n"
    tracking_kernel.ok(TRAIN)
    (run,) = tmp_path.iterdir()
    curves = scalars(run)
    assert curves["loss"] == [(0, 0.0), (1, 0.5), (2, 1.0)]
    assert curves["lr"] == [(step, pytest.approx(0.1)) for step in range(3)]
    assert math.isnan(curves["accuracy"][0][1])
    # more steps belong to the same run, a restart to another one
    tracking_kernel.ok("%%distributed\naxon_nb.log(loss=9.0)")
    assert scalars(run)["loss"][-1] == (3, 9.0)
    tracking_kernel.ok("%%distributed\naxon_nb.log(loss=7.0, step=0)")
    (second,) = set(tmp_path.iterdir()) - {run}
    assert scalars(second) == {"loss": [(0, 7.0)]}
    # and none to a run of the user, or after `off`
    tracking_kernel.ok("%distributed config log_to=off")
    tracking_kernel.ok("%%distributed\naxon_nb.log(loss=8.0)")
    assert scalars(second) == {"loss": [(0, 7.0)]}


@needs("tensorboard")
def test_all_ranks_write_a_run_each(tracking_kernel: Kernel, tmp_path: Path) -> None:
    tracking_kernel.ok(f"%distributed config log_to=all:tensorboard:{tmp_path}")
    tracking_kernel.ok(TRAIN)
    first = {run.name[-1]: scalars(run)["loss"][0] for run in tmp_path.iterdir()}
    assert first == {str(rank): (0, float(rank)) for rank in range(4)}


@needs("tensorboard")
def test_tracker_that_fails_stops_no_training(tracking_kernel: Kernel, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    tracking_kernel.ok(f"%distributed config log_to=tensorboard:{tmp_path / 'file'}")
    reply = tracking_kernel.ok(f"{TRAIN}print('done')")
    assert "done" in reply.stdout
    assert "axon_nb.log could not write to the tracker (`config log_to`): " in reply.stderr


@needs("wandb")
def test_wandb_without_a_key_is_offline(tracking_kernel: Kernel, tmp_path: Path) -> None:
    tracking_kernel.ok(f"%%distributed\nimport os\nos.environ['WANDB_DIR'] = {str(tmp_path)!r}")
    tracking_kernel.ok("%distributed config log_to=wandb:demo")
    tracking_kernel.ok(TRAIN)
    tracking_kernel.ok("%distributed config log_to=off")
    tracking_kernel.ok("%%distributed\npass")
    (run,) = tmp_path.glob("wandb/offline-run-*/run-*.wandb")
    assert run.stat().st_size > 0


@pytest.mark.filterwarnings("default")  # of its own dependencies
@needs("mlflow")
def test_mlflow_has_the_metrics_and_an_ended_run(tracking_kernel: Kernel, tmp_path: Path) -> None:
    import mlflow

    where = f"sqlite:///{tmp_path / 'mlflow.db'}"
    tracking_kernel.ok(f"%distributed config log_to=mlflow:{where}")
    tracking_kernel.ok(TRAIN)
    tracking_kernel.ok("%distributed config log_to=off")
    tracking_kernel.ok("%%distributed\npass")
    client = mlflow.MlflowClient(tracking_uri=where)
    (run,) = client.search_runs([client.get_experiment_by_name("axon_nb").experiment_id])
    history = client.get_metric_history(run.info.run_id, "loss")
    assert [(point.step, point.value) for point in history] == [(0, 0.0), (1, 0.5), (2, 1.0)]
    assert run.info.status == "FINISHED"


@needs("trackio")
def test_trackio_has_the_metrics(tracking_kernel: Kernel, tmp_path: Path) -> None:
    tracking_kernel.ok(f"%%distributed\nimport os\nos.environ['TRACKIO_DIR'] = {str(tmp_path)!r}")
    tracking_kernel.ok("%distributed config log_to=trackio:demo")
    tracking_kernel.ok(TRAIN)
    tracking_kernel.ok("%distributed config log_to=off")
    tracking_kernel.ok("%%distributed\npass")
    assert list(tmp_path.rglob("demo*"))


@pytest.mark.parametrize(
    ("value", "sentence"),
    [
        ("csv:file", "log_to must be off, or one of tensorboard:FOLDER, wandb:PROJECT"),
        ("tensorboard:", "log_to must be off, or one of tensorboard:FOLDER, wandb:PROJECT"),
    ],
)
def test_unknown_tracker_is_rejected_in_one_sentence(tracking_kernel: Kernel, value: str, sentence: str) -> None:
    assert sentence in tracking_kernel.run(f"%distributed config log_to={value}").traceback
