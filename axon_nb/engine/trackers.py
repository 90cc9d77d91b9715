"""Sends what `axon_nb.log` reports on this rank to an experiment tracker, from its own thread.

A training run, as `Logged.run` counts them, becomes a run of the tracker. The thread reads the ring of metrics as
`%watch` does, so a step waits neither for the tracker nor for the GPU.
"""

from __future__ import annotations

import atexit
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from msgspec import Struct

from axon_nb.engine.session import RankSession
from axon_nb.records.protocol.cells import CellFacts
from axon_nb.records.training.job import Logged, metrics

_PERIOD_S = 0.5
_FLUSH_S = 5.0
"""How long the end of a cell waits for the tracker."""
_TIME = "%Y-%m-%d_%H-%M-%S"
_ALL = "all:"
_MAX_ROWS = 2000


class _Run(Struct, frozen=True):
    """An open run of a tracker."""

    write: Callable[[int, Mapping[str, float]], object]
    """Adds the values of a step."""
    finish: Callable[[], object]
    """Closes the run."""
    flush: Callable[[], object] = lambda: None
    """Makes what was written visible to others, if the tracker does not do so by itself."""


def _tensorboard(where: str, name: str) -> _Run:
    """Open a folder of events."""
    from torch.utils.tensorboard import SummaryWriter

    writer: Any = SummaryWriter(str(Path(where, name)))

    def write(step: int, values: Mapping[str, float]) -> None:
        for key, value in values.items():
            writer.add_scalar(key, value, step)

    return _Run(write, writer.close, writer.flush)


def _wandb(where: str, name: str) -> _Run:
    """Open a run of Weights & Biases; offline without a key."""
    import wandb

    options: dict[str, Any] = {"project": where, "name": name, "reinit": "create_new"}
    settings = wandb.Settings(console="off", silent=True)
    try:
        run = wandb.init(**options, settings=settings)
    except wandb.errors.UsageError:  # no key, and nobody to ask for it
        run = wandb.init(**options, settings=settings, mode="offline")
    # Names have their own steps, and W&B drops what goes back.
    run.define_metric("*", step_metric="step")
    return _Run(lambda step, values: run.log({**values, "step": step}), run.finish)


def _mlflow(where: str, name: str) -> _Run:
    """Open a run of MLflow, by its client: the cell's own active run stays what it is."""
    import mlflow

    client = mlflow.MlflowClient(tracking_uri=where)
    experiment = client.get_experiment_by_name("axon_nb")
    number = experiment.experiment_id if experiment else client.create_experiment("axon_nb")
    run = client.create_run(number, run_name=name).info.run_id

    def write(step: int, values: Mapping[str, float]) -> None:
        for key, value in values.items():
            client.log_metric(run, key, value, step=step)

    return _Run(write, lambda: client.set_terminated(run))


def _trackio(where: str, name: str) -> _Run:
    """Open a run of trackio."""
    import trackio

    run = trackio.init(project=where, name=name, embed=False)
    return _Run(lambda step, values: run.log(dict(values), step=step), run.finish)


_TRACKERS: Mapping[str, Callable[[str, str], _Run]] = {
    "tensorboard": _tensorboard,
    "wandb": _wandb,
    "mlflow": _mlflow,
    "trackio": _trackio,
}


class MetricsWriter:
    """Writes the metrics of this rank to the tracker that the notebook names."""

    def __init__(self, session: RankSession) -> None:
        self._rank = session.config.rank
        self._wanted = self._target = ""
        """What the notebook names, and what the thread writes to."""
        self._begin = self._position = 0
        """In the ring of metrics: where to start with a new target, and how far the thread is."""
        self._tag: tuple[int, int] = (0, 0)
        """The training run that is open."""
        self._run: _Run | None = None
        self._wake, self._written = threading.Event(), threading.Event()
        self._thread: threading.Thread | None = None

    @property
    def is_on(self) -> bool:
        """Whether it writes anywhere."""
        return bool(self._wanted)

    def begin_cell(self, facts: CellFacts) -> None:
        """Write where the cell says: ``tensorboard:runs``, or ``all:tensorboard:runs`` for all ranks."""
        if facts.log_to is not None:
            self._set_target(facts.log_to)

    def _set_target(self, target: str) -> None:
        if self._rank > 0 and not target.startswith(_ALL):
            target = ""
        if target == self._wanted:
            return
        self._wanted, self._begin = target, metrics.end
        if self._thread is None:
            self._thread = threading.Thread(target=self._loop, name="axon_nb-tracker", daemon=True)
            self._thread.start()
            atexit.register(self._finish_at_exit)

    def end_cell(self, *, is_ok: bool = True) -> None:
        """Wait until what the cell has logged is written, for a few seconds at most."""
        deadline = time.monotonic() + _FLUSH_S
        while self._is_behind() and (left := deadline - time.monotonic()) > 0:
            self._written.clear()
            self._wake.set()
            self._written.wait(left)

    def _is_behind(self) -> bool:
        return self._wanted != self._target or (self._target != "" and self._position < metrics.end)

    def _finish_at_exit(self) -> None:
        self._set_target("")
        self.end_cell()

    def _loop(self) -> None:
        while True:
            self._wake.wait(_PERIOD_S)
            self._wake.clear()
            try:
                self._update()
            except Exception as error:  # whatever the tracker's library raises: training goes on
                self._run, self._position = None, metrics.end
                text = f"{type(error).__name__}: {error}"
                print(f"axon_nb.log could not write to the tracker (`config log_to`): {text}", file=sys.stderr)
            self._written.set()

    def _update(self) -> None:
        if self._wanted != self._target:
            self._target, self._position = self._wanted, self._begin
            self._finish()
        while self._target and self._target == self._wanted and self._position < metrics.end:
            self._write()

    def _write(self) -> None:
        rows, end, lost = metrics.read(self._position, _MAX_ROWS)
        if lost:
            print(f"{lost} calls of axon_nb.log did not reach the tracker: it is too slow.", file=sys.stderr)
        for row in rows:
            if self._run is None or row.run != self._tag:
                self._finish()
                self._run, self._tag = self._start(row), row.run
            self._run.write(row.step, row.values)
        if self._run is not None:
            self._run.flush()
        self._position = end

    def _start(self, row: Logged) -> _Run:
        kind, _, where = self._target.removeprefix(_ALL).partition(":")
        cell, number = row.run
        name = f"{time.strftime(_TIME)}_cell{cell}" + (f"_{number + 1}" if number else "")
        return _TRACKERS[kind](where, f"{name}_rank{self._rank}" if self._target.startswith(_ALL) else name)

    def _finish(self) -> None:
        run, self._run = self._run, None
        if run is not None:
            run.finish()
