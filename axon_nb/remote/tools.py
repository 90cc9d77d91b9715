"""The tools of `axon-nb mcp`: what a model can ask and do, within limits of time and size.

Each method of `Tools` is a tool; its docstring and its signature are what the model reads.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from axon_nb.doctor.clusters import find_clusters
from axon_nb.errors import AxonError
from axon_nb.records.endpoint import EndpointError, ErrorCode
from axon_nb.remote.client import connect
from axon_nb.remote.limits import within

TOOLS = (
    "clusters",
    "status",
    "explain",
    "stacks",
    "vars",
    "compare",
    "timeline",
    "logs",
    "plan",
    "export",
    "start",
    "stop",
    "run_start",
    "run_poll",
    "run_tail",
    "run_cancel",
    "interrupt",
    "repair",
)
WRITING = frozenset({"start", "stop", "run_start", "run_poll", "run_tail", "run_cancel", "interrupt", "repair"})
"""Tools that are refused without ``--allow-run``."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What one call of a tool may take."""

    seconds: float = 60.0
    characters: int = 8000
    """Of the reply, as JSON."""


class Tools:
    """Performs the calls; each returns plain JSON values.

    Args:
        limits: What one call may take.
        can_run: Whether the tools of `WRITING` are allowed.
    """

    def __init__(self, limits: Limits, *, can_run: bool) -> None:
        self._limits = limits
        self._can_run = can_run

    def call(self, name: str, arguments: dict[str, Any]) -> dict[str, Any]:
        """Perform a call within the limits; an error is ``{"error": {"code", "message"}}``."""
        try:
            if name in WRITING and not self._can_run:
                raise EndpointError(
                    ErrorCode.REFUSED, f"{name} is not allowed: the server runs without --allow-run, so it only reads."
                )
            reply = getattr(self, name)(**arguments)
        except EndpointError as error:
            reply = error.to_json()
        except (AxonError, OSError) as error:
            reply = EndpointError(ErrorCode.FAILED, str(error)).to_json()
        return within(reply, self._limits.characters)

    def _ask(self, cluster: str | None, operation: str, /, **arguments: Any) -> dict[str, Any]:
        reply = connect(cluster).request(operation, timeout_s=self._limits.seconds, **arguments)
        return {key: value for key, value in reply.items() if key != "text"}

    def clusters(self) -> dict[str, Any]:
        """List the clusters of this user on this host: name, state, number of ranks."""
        keys = ("name", "state", "num_ranks", "backend", "keep_alive_left_s")
        clusters = [one.to_json() for one in find_clusters()]
        return {"clusters": [{key: one[key] for key in keys} for one in clusters]}

    def status(self, cluster: str | None = None) -> dict[str, Any]:
        """Show what each rank is doing, its memory, which ranks are busy, and the result of the last cell."""
        return self._ask(cluster, "status")

    def explain(self, cluster: str | None = None) -> dict[str, Any]:
        """Say why a cell hangs: which rank the others wait for and where, or the deadlock. Use it first."""
        return self._ask(cluster, "explain")

    def stacks(self, ranks: str | None = None, cluster: str | None = None) -> dict[str, Any]:
        """Show the Python stack of each rank; ranks at the same place share an entry. ranks: such as "0,2-3"."""
        return self._ask(cluster, "stacks", ranks=ranks)

    def vars(self, cluster: str | None = None) -> dict[str, Any]:
        """List the variables on the ranks: type, shape, bytes, whether ranks agree. Names and types while busy."""
        return self._ask(cluster, "variables")

    def compare(self, name: str, from_rank: int = 0, cluster: str | None = None) -> dict[str, Any]:
        """Show where a variable (tensor, model, array, table) differs from that of from_rank: values and shapes."""
        return self._ask(cluster, "difference", name=name, from_rank=from_rank)

    def timeline(self, limit: int = 20, cluster: str | None = None) -> dict[str, Any]:
        """Summarize where time went by call: seconds over all ranks, time spent waiting, the rank waited for."""
        return self._ask(cluster, "timeline", limit=limit)

    def logs(self, cluster: str | None = None) -> dict[str, Any]:
        """Show what the ranks printed in the last cell, also while it runs, and outside of cells."""
        return self._ask(cluster, "logs")

    def plan(
        self,
        model: str,
        ranks: int,
        *,
        card: str = "h100",
        memory_gib: float | None = None,
        context: int = 2048,
        global_batch: int | None = None,
        top: int = 5,
    ) -> dict[str, Any]:
        """Rank the training layouts (data, tensor, pipeline parallel) of a model on GPUs that need not exist.

        model: the size of a GPT such as "7B" or "13B", or a Hugging Face model. card: "h100", "a100" and so on.
        It takes half a minute of processor time.
        """
        options = {"memory": memory_gib, "batch": global_batch, "context": context, "card": card, "top": top}
        words = [f"--{name}={value}" for name, value in options.items() if value is not None]
        return self._program("plan", f"--ranks={ranks}", *words, "--", model)

    def export(self, notebook: str, live_only: bool = False) -> dict[str, Any]:
        """Return the %%distributed cells of a saved notebook as one script for torchrun."""
        from axon_nb.export import export_notebook

        with tempfile.TemporaryDirectory() as folder:
            script = Path(folder) / "script.py"
            report = export_notebook(Path(notebook), script, live_only=live_only, force=False)
            return {"script": script.read_text(encoding="utf-8"), "report": str(report).replace(f"{folder}/", "")}

    def start(self, n: int, name: str | None = None, devices: str = "auto") -> dict[str, Any]:
        """Start a cluster of n ranks that lives as long as this server. devices: "auto", "cpu" or GPU numbers."""
        from axon_nb.cluster.session import current
        from axon_nb.cluster.session.start import start

        with _standard_output_kept():
            cluster = start(n, name=name, devices=devices)
        current.session().settings.set(share=True)
        return {"name": cluster.name, "num_ranks": cluster.world_size, "backend": cluster.backend}

    def stop(self) -> dict[str, Any]:
        """Stop the cluster that this server has started."""
        from axon_nb.cluster.session import current

        cluster = current.get()
        if cluster is None:
            raise EndpointError(ErrorCode.NO_CLUSTER, "This server has started no cluster.")
        with _standard_output_kept():
            cluster.stop()
        return {"stopped": cluster.name}

    def run_start(
        self, code: str, ranks: str | None = None, timeout: float | None = None, cluster: str | None = None
    ) -> dict[str, Any]:
        """Start a cell on the ranks and return its run id at once; then use run_poll. Print what you want to see.

        code: Python; each rank has `rank`, `world_size`, `device`, `torch` and `dist` (torch.distributed).
        timeout: seconds after which the cell is aborted; give one, as a cell may hang.
        """
        return self._ask(cluster, "run", code=code, ranks=ranks, timeout=timeout)

    def run_poll(self, run: str, wait_s: float = 5.0, cluster: str | None = None) -> dict[str, Any]:
        """Wait up to wait_s seconds for a run; return whether it is done, and its result (state, cause, verdict)."""
        reply = self._ask(cluster, "poll", run=run, wait_s=min(wait_s, self._limits.seconds))
        return {key: reply[key] for key in ("run", "done", "result")}

    def run_tail(self, run: str, since: dict[str, int] | None = None, cluster: str | None = None) -> dict[str, Any]:
        """Return what a run printed; pass since from the last reply to get only what is new."""
        return self._ask(cluster, "poll", run=run, since=since)

    def run_cancel(self, run: str, cluster: str | None = None) -> dict[str, Any]:
        """Interrupt a run; the ranks and their variables stay."""
        return self._ask(cluster, "cancel", run=run)

    def interrupt(self, cluster: str | None = None) -> dict[str, Any]:
        """Interrupt whatever cell runs, as the notebook's stop button does."""
        return self._ask(cluster, "interrupt")

    def repair(self, from_rank: int | None = None, cluster: str | None = None) -> dict[str, Any]:
        """Replace the ranks that died; the others keep their variables.

        from_rank: a rank whose variables the new ones get, as replicas have them (DDP); else they start empty.
        """
        reply = connect(cluster).request("repair", timeout_s=self._limits.seconds, from_rank=from_rank)
        return {"repaired": reply["text"]}

    def _program(self, *words: str) -> dict[str, Any]:
        """Run a command of `axon-nb` in another process, which the limit of time can end."""
        try:
            done = subprocess.run(
                [sys.executable, "-m", "axon_nb.cli", words[0], "--json", *words[1:]],
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=self._limits.seconds,
                check=False,
            )
        except subprocess.TimeoutExpired:
            raise EndpointError(
                ErrorCode.NO_REPLY, f"{words[0]} took longer than {self._limits.seconds:g} s (--max-seconds)."
            ) from None
        try:
            reply: dict[str, Any] = json.loads(done.stdout)
        except ValueError:
            raise EndpointError(ErrorCode.FAILED, done.stderr.strip()[-500:] or f"{words[0]} failed.") from None
        return reply


@contextlib.contextmanager
def _standard_output_kept() -> Iterator[None]:
    """Send prints to standard error: standard output belongs to the protocol."""
    with contextlib.redirect_stdout(sys.stderr):
        yield
