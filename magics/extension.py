"""Loads and unloads the extension: registers magics, transformers, completion and hooks."""

from __future__ import annotations

import threading

from IPython.core.interactiveshell import InteractiveShell
from IPython.core.magic import Magics

from axon_nb.cluster.session import current, discovery, start
from axon_nb.errors import AxonError
from axon_nb.magics import completion, kernel_requests
from axon_nb.magics.arguments import with_help
from axon_nb.magics.auto import AutoMagics, auto_cells
from axon_nb.magics.cell_head import auto_mode, awaited_cells, help_requests
from axon_nb.magics.cells import CellMagics
from axon_nb.magics.completion import rank_matcher
from axon_nb.magics.data import DataMagics
from axon_nb.magics.distributed import DistributedMagics
from axon_nb.magics.views import JobViewMagics, TimelineMagics, ViewMagics

__all__ = ["load", "unload"]

_CLASSES = (
    AutoMagics,
    CellMagics,
    DataMagics,
    DistributedMagics,
    JobViewMagics,
    TimelineMagics,
    ViewMagics,
)
_TRANSFORMERS = (awaited_cells, help_requests, auto_cells)


def load(shell: InteractiveShell) -> None:
    """Register the magics; report a cluster of this notebook that is still running, else start warming up.

    On a rank, where a cell may load the extension by mistake, the magics refuse to run; the hooks are for the notebook.
    """
    session = current.session()
    session.settings.configure(shell.config.get("AxonNB", {}))
    for cls in _CLASSES:
        shell.register_magics(cls)
        _add_help(shell, cls)
    if start.own_rank() is not None:
        return
    for transformer in _TRANSFORMERS:
        if transformer not in shell.input_transformers_cleanup:
            shell.input_transformers_cleanup.append(transformer)
    _install_completion(shell)
    shell.events.register("post_run_cell", session.history.record_cell)
    session.watch_shutdown()
    session.interrupts.install()
    session.settings.callbacks["warm_up"] = _warm
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
    for transformer in _TRANSFORMERS:
        if transformer in shell.input_transformers_cleanup:
            shell.input_transformers_cleanup.remove(transformer)
    session.settings.callbacks.pop("warm_up", None)
    auto_mode.on = False
    _uninstall_completion(shell)
    if session.history.record_cell in shell.events.callbacks["post_run_cell"]:
        shell.events.unregister("post_run_cell", session.history.record_cell)
    session.interrupts.uninstall()
    manager = shell.magics_manager
    for cls in _CLASSES:
        manager.registry.pop(cls.__name__, None)
        for kind, names in cls.magics.items():
            for name in names:
                manager.magics[kind].pop(name, None)


def _warm(on: bool) -> None:
    """Apply the setting `warm_up`."""
    session = current.session()
    if not on:
        # On a thread, because it waits for a host agent that is still starting.
        threading.Thread(target=session.prewarm.discard, name="axon_nb-cool-down", daemon=True).start()
    elif session.cluster is None:
        session.prewarm.start()


def _add_help(shell: InteractiveShell, cls: type[Magics]) -> None:
    magics = shell.magics_manager.magics["line"]
    for name in cls.magics.get("line", ()):
        magics[name] = with_help(magics[name])


def _install_completion(shell: InteractiveShell) -> None:
    if rank_matcher not in shell.Completer.custom_matchers:
        shell.Completer.custom_matchers.append(rank_matcher)
        shell.events.register("post_run_cell", completion.after_cell)
    kernel_requests.install()


def _uninstall_completion(shell: InteractiveShell) -> None:
    if rank_matcher in shell.Completer.custom_matchers:
        shell.Completer.custom_matchers.remove(rank_matcher)
        shell.events.unregister("post_run_cell", completion.after_cell)
    completion.cancel_refresh()
    kernel_requests.uninstall()
