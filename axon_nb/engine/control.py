"""What a rank answers at any time, even while its main thread is stuck: status, interrupt, watch."""

from __future__ import annotations

import dataclasses
from typing import Any

from axon_nb.engine.background import users_threads
from axon_nb.engine.cell_log import CellLog
from axon_nb.engine.groups.abort import ABORT, stop_at
from axon_nb.engine.groups.recovery import abort, condition, waits
from axon_nb.engine.interrupts import Interrupts
from axon_nb.engine.kernel_hooks import ControlHandler
from axon_nb.engine.sampler import Sampler
from axon_nb.engine.session import current
from axon_nb.engine.stacks import cell_stack
from axon_nb.engine.telemetry import Telemetry
from axon_nb.engine.view_requests import view_handlers

__all__ = ["control_handlers"]


def control_handlers(
    sampler: Sampler, interrupts: Interrupts, telemetry: Telemetry, log: CellLog
) -> dict[str, ControlHandler]:
    """The requests of the control channel, by message type."""

    def status(content: dict[str, Any]) -> dict[str, Any]:
        return dataclasses.asdict(sampler.sample())

    def watch(content: dict[str, Any]) -> dict[str, Any]:
        telemetry.watch(hz=float(content["hz"]), seconds=float(content["seconds"]))
        return {}

    def abort_cell(content: dict[str, Any]) -> dict[str, Any]:
        # The flag first: what the interrupt wakes must not begin to wait again.
        ABORT.set()
        unheard = interrupts.unheard
        interrupted = interrupts.interrupt(content.get("run"))
        abort(again=bool(content.get("again")))
        return {"interrupted": interrupted, "unheard": unheard, "line": sampler.sample().line if unheard else None}

    def tell_waits(content: dict[str, Any]) -> dict[str, Any]:
        state = sampler.sample()
        own = {"rank": state.rank, "running": state.cell is not None, "line": state.line, "call": state.call}
        own["via"], own["waited"] = sampler.via() if state.call else ("", 0)
        return {**own, **waits(), "threads": users_threads()}

    def stacks(content: dict[str, Any]) -> dict[str, Any]:
        return {"state": dataclasses.asdict(sampler.sample()), "frames": cell_stack(current(), interrupts)}

    def tell_spans(content: dict[str, Any]) -> dict[str, Any]:
        from axon_nb.engine.span_reader import span_reader

        return span_reader().read(since=int(content["since"]), watch_s=float(content["watch"]))

    def stop(content: dict[str, Any]) -> dict[str, Any]:
        stop_at(int(content["at"]), group=str(content["group"]))
        return {}

    def tell_cells(content: dict[str, Any]) -> dict[str, Any]:
        asked = {"run": content.get("run"), "since": content.get("since", 0), "after_ns": content.get("after_ns", 0)}
        return {"cells": log.report(**asked), "running": interrupts.running, **condition()}

    return {
        "axon_abort": abort_cell,
        "axon_cells": tell_cells,
        "axon_spans": tell_spans,
        "axon_stacks": stacks,
        "axon_status": status,
        "axon_stop": stop,
        "axon_waits": tell_waits,
        "axon_watch": watch,
        **view_handlers(sampler, tell_waits),
    }
