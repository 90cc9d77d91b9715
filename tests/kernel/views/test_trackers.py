"""`axon_nb.log` also writes to an experiment tracker: each of them, offline, with its own package."""

from __future__ import annotations

import math
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.support.kernel import Kernel

TRAIN = """%%distributed
import axon_nb, torch
for step in range(3):
    axon_nb.log(loss=torch.tensor(rank + step / 2), lr=0.1, step=step)
axon_nb.log(accuracy=float("nan"), step=2)
"""


def needs(package: str) -> pytest.MarkDecorator:
    """Skip if a package is missing."""
    return pytest.mark.skipif(find_spec(package) is None, reason=f"needs {package}")


@pytest.fixture
def kernel(shared_kernel: Kernel) -> Iterator[Kernel]:
    yield shared_kernel
    shared_kernel.ok("%distributed config log_to=off")


def scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """The curves of a run of TensorBoard."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events: Any = EventAccumulator(str(folder))
    events.Reload()
    return {name: [(point.step, point.value) for point in events.Scalars(name)] for name in events.Tags()["scalars"]}


@needs("tensorboard")
def test_rank_0_writes_each_training_run_to_tensorboard(kernel: Kernel, tmp_path: Path) -> None:
    said = kernel.ok(f"%distributed config log_to=tensorboard:{tmp_path}").stdout
    assert said == f"log_to = tensorboard:{tmp_path} (from the next cell)\n"
    kernel.ok(TRAIN)
    (run,) = tmp_path.iterdir()
    curves = scalars(run)
    assert curves["loss"] == [(0, 0.0), (1, 0.5), (2, 1.0)]
    assert curves["lr"] == [(step, pytest.approx(0.1)) for step in range(3)]
    assert math.isnan(curves["accuracy"][0][1])
    # more steps belong to the same run, a restart to another one
    kernel.ok("%%distributed\naxon_nb.log(loss=9.0)")
    assert scalars(run)["loss"][-1] == (3, 9.0)
    kernel.ok("%%distributed\naxon_nb.log(loss=7.0, step=0)")
    (second,) = set(tmp_path.iterdir()) - {run}
    assert scalars(second) == {"loss": [(0, 7.0)]}
    # and none to a run of the user, or after `off`
    kernel.ok("%distributed config log_to=off")
    kernel.ok("%%distributed\naxon_nb.log(loss=8.0)")
    assert scalars(second) == {"loss": [(0, 7.0)]}


@needs("tensorboard")
def test_all_ranks_write_a_run_each(kernel: Kernel, tmp_path: Path) -> None:
    kernel.ok(f"%distributed config log_to=all:tensorboard:{tmp_path}")
    kernel.ok(TRAIN)
    first = {run.name[-1]: scalars(run)["loss"][0] for run in tmp_path.iterdir()}
    assert first == {str(rank): (0, float(rank)) for rank in range(4)}


@needs("tensorboard")
def test_tracker_that_fails_stops_no_training(kernel: Kernel, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    kernel.ok(f"%distributed config log_to=tensorboard:{tmp_path / 'file'}")
    reply = kernel.ok(f"{TRAIN}print('done')")
    assert "done" in reply.stdout
    assert "axon_nb.log could not write to the tracker (`config log_to`): " in reply.stderr


@needs("wandb")
def test_wandb_without_a_key_is_offline(kernel: Kernel, tmp_path: Path) -> None:
    kernel.ok(f"%%distributed\nimport os\nos.environ['WANDB_DIR'] = {str(tmp_path)!r}")
    kernel.ok("%distributed config log_to=wandb:demo")
    kernel.ok(TRAIN)
    kernel.ok("%distributed config log_to=off")
    kernel.ok("%%distributed\npass")
    (run,) = tmp_path.glob("wandb/offline-run-*/run-*.wandb")
    assert run.stat().st_size > 0


@pytest.mark.filterwarnings("default")  # of its own dependencies
@needs("mlflow")
def test_mlflow_has_the_metrics_and_an_ended_run(kernel: Kernel, tmp_path: Path) -> None:
    import mlflow

    where = f"sqlite:///{tmp_path / 'mlflow.db'}"
    kernel.ok(f"%distributed config log_to=mlflow:{where}")
    kernel.ok(TRAIN)
    kernel.ok("%distributed config log_to=off")
    kernel.ok("%%distributed\npass")
    client = mlflow.MlflowClient(tracking_uri=where)
    (run,) = client.search_runs([client.get_experiment_by_name("axon_nb").experiment_id])
    history = client.get_metric_history(run.info.run_id, "loss")
    assert [(point.step, point.value) for point in history] == [(0, 0.0), (1, 0.5), (2, 1.0)]
    assert run.info.status == "FINISHED"


@needs("trackio")
def test_trackio_has_the_metrics(kernel: Kernel, tmp_path: Path) -> None:
    kernel.ok(f"%%distributed\nimport os\nos.environ['TRACKIO_DIR'] = {str(tmp_path)!r}")
    kernel.ok("%distributed config log_to=trackio:demo")
    kernel.ok(TRAIN)
    kernel.ok("%distributed config log_to=off")
    kernel.ok("%%distributed\npass")
    assert list(tmp_path.rglob("demo*"))


@pytest.mark.parametrize(
    ("value", "sentence"),
    [
        ("csv:file", "log_to must be off, or one of tensorboard:FOLDER, wandb:PROJECT"),
        ("tensorboard:", "log_to must be off, or one of tensorboard:FOLDER, wandb:PROJECT"),
    ],
)
def test_unknown_tracker_is_rejected_in_one_sentence(kernel: Kernel, value: str, sentence: str) -> None:
    assert sentence in kernel.run(f"%distributed config log_to={value}").traceback
