"""Loads and unloads the extension: registers magics, transformers, completion and hooks."""

from __future__ import annotations

import threading

from IPython.core.interactiveshell import InteractiveShell

from axon_nb.cluster.session import current, discovery, start
from axon_nb.cluster.session.notebook import NotebookSession
from axon_nb.errors import AxonError
from axon_nb.magics import kernel_requests
from axon_nb.magics.auto import AutoMagics, auto_cells
from axon_nb.magics.cell_head import awaited_cells, help_requests, injected_parameters
from axon_nb.magics.cells import CellMagics
from axon_nb.magics.completion import NameRefresh, rank_matcher
from axon_nb.magics.data import DataMagics
from axon_nb.magics.distributed import DistributedMagics
from axon_nb.magics.kernel_requests import RequestHandler
from axon_nb.magics.plan import PlanMagics
from axon_nb.magics.views import JobViewMagics, TimelineMagics, ViewMagics

_CLASSES = (
    AutoMagics,
    CellMagics,
    DataMagics,
    DistributedMagics,
    JobViewMagics,
    PlanMagics,
    TimelineMagics,
    ViewMagics,
)
_TRANSFORMERS = (injected_parameters, awaited_cells, help_requests, auto_cells)


class Extension:
    """What `%load_ext axon_nb` adds to a notebook's shell besides magics.

    Args:
        shell: The shell.
        session: The notebook's session.
    """

    def __init__(self, shell: InteractiveShell, session: NotebookSession) -> None:
        self._shell = shell
        self._session = session
        self._refresh = NameRefresh(session)
        self._requests: RequestHandler | None = None

    def install(self) -> None:
        """Add it."""
        shell, session = self._shell, self._session
        shell.input_transformers_cleanup.extend(_TRANSFORMERS)
        shell.Completer.custom_matchers.append(rank_matcher)
        shell.events.register("post_run_cell", self._refresh.after_cell)
        shell.events.register("post_run_cell", session.history.record_cell)
        self._requests = kernel_requests.install(session)
        session.watch_shutdown()
        session.interrupts.install()
        session.settings.callbacks["warm_up"] = self._warm

    def uninstall(self) -> None:
        """Remove it."""
        shell, session = self._shell, self._session
        for transformer in _TRANSFORMERS:
            shell.input_transformers_cleanup.remove(transformer)
        shell.Completer.custom_matchers.remove(rank_matcher)
        shell.events.unregister("post_run_cell", self._refresh.after_cell)
        shell.events.unregister("post_run_cell", session.history.record_cell)
        self._refresh.cancel()
        if self._requests is not None:
            self._requests.uninstall()
        session.interrupts.uninstall()
        session.settings.callbacks.pop("warm_up", None)
        session.auto.on = False

    def _warm(self, on: bool) -> None:
        """Apply the setting `warm_up`."""
        prewarm = self._session.prewarm
        if not on:
            # On a thread, because it waits for a host agent that is still starting.
            threading.Thread(target=prewarm.discard, name="axon_nb-cool-down", daemon=True).start()
        elif self._session.cluster is None:
            prewarm.start()


def load(shell: InteractiveShell) -> None:
    """Register the magics; report a cluster of this notebook that is still running, else start warming up.

    On a rank, where a cell may load the extension by mistake, the magics refuse to run; the hooks are for the notebook.
    """
    session = current.session()
    session.settings.configure(shell.config.get("AxonNB", {}))
    for cls in _CLASSES:
        shell.register_magics(cls)
    if start.own_rank() is not None:
        return
    if session.extension is None:
        extension = Extension(shell, session)
        extension.install()
        session.extension = extension
    if session.cluster is not None:
        return
    try:
        waiting = discovery.own_detached()
    except AxonError as error:
        print(error)
        return
    if waiting:
        entry = waiting[0]
        count = f"{entry.num_ranks} rank{'' if entry.num_ranks == 1 else 's'}"
        print(
            f"The cluster {entry.name!r} ({count}) of this notebook is still running. Run `%distributed attach` to "
            "reconnect, or `%distributed start` to stop it and start a new one. A cell on ranks reconnects, too."
        )
    elif session.settings.warm_up:
        session.prewarm.start()


def unload(shell: InteractiveShell) -> None:
    """Undo `load`."""
    session = current.session()
    if session.extension is not None:
        session.extension.uninstall()
        session.extension = None
    manager = shell.magics_manager
    for cls in _CLASSES:
        manager.registry.pop(cls.__name__, None)
        for kind, names in cls.magics.items():
            for name in names:
                manager.magics[kind].pop(name, None)
