"""What loading and unloading the extension does."""

from __future__ import annotations

import threading

from IPython.core.interactiveshell import InteractiveShell
from IPython.core.magic import Magics

from axon_nb.cluster import history
from axon_nb.cluster.cells import kernel_interrupts
from axon_nb.cluster.launch import prewarm
from axon_nb.cluster.session import current, discovery
from axon_nb.cluster.session import current as lifecycle
from axon_nb.cluster.settings import settings
from axon_nb.errors import AxonError
from axon_nb.magics import completion, kernel_requests
from axon_nb.magics.arguments import telling_help
from axon_nb.magics.auto import AutoMagics, auto_cells
from axon_nb.magics.cell_head import asked_help, auto_mode, awaited_cells
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
_TRANSFORMERS = (awaited_cells, asked_help, auto_cells)


def load(shell: InteractiveShell) -> None:
    """Register the magics; say in one line if a cluster waits for this notebook, else warm up."""
    for cls in _CLASSES:
        shell.register_magics(cls)
        _tell_help(shell, cls)
    for transformer in _TRANSFORMERS:
        if transformer not in shell.input_transformers_cleanup:
            shell.input_transformers_cleanup.append(transformer)
    _assist(shell)
    shell.events.register("post_run_cell", history.record_cell)
    lifecycle.watch_shutdown()
    kernel_interrupts.install()
    settings.callbacks["warm_up"] = _warm
    if current.get() is not None:
        return
    try:
        waiting = discovery.own_detached()
    except AxonError as error:
        print(error)
        return
    if waiting:
        entry = waiting[0]
        print(
            f"The cluster {entry.name!r} ({entry.num_ranks} ranks) of this notebook is still running: "
            "`%distributed attach` takes it up again, `%distributed start` ends it and starts afresh."
        )
    elif settings.warm_up:
        prewarm.start()


def unload(shell: InteractiveShell) -> None:
    """Take back what `load` registered."""
    for transformer in _TRANSFORMERS:
        if transformer in shell.input_transformers_cleanup:
            shell.input_transformers_cleanup.remove(transformer)
    settings.callbacks.pop("warm_up", None)
    auto_mode.on = False
    _stop_assisting(shell)
    if history.record_cell in shell.events.callbacks["post_run_cell"]:
        shell.events.unregister("post_run_cell", history.record_cell)
    kernel_interrupts.uninstall()
    manager = shell.magics_manager
    for cls in _CLASSES:
        manager.registry.pop(cls.__name__, None)
        for kind, names in cls.magics.items():
            for name in names:
                manager.magics[kind].pop(name, None)


def _warm(on: bool) -> None:
    """The setting `warm_up` has been set."""
    if not on:
        # One that is still coming up is waited for.
        threading.Thread(target=prewarm.discard, name="axon_nb-cool-down", daemon=True).start()
    elif current.get() is None:
        prewarm.start()


def _tell_help(shell: InteractiveShell, cls: type[Magics]) -> None:
    magics = shell.magics_manager.magics["line"]
    for name in cls.magics.get("line", ()):
        magics[name] = telling_help(magics[name])


def _assist(shell: InteractiveShell) -> None:
    if rank_matcher not in shell.Completer.custom_matchers:
        shell.Completer.custom_matchers.append(rank_matcher)
        shell.events.register("post_run_cell", completion.after_cell)
    kernel_requests.install()


def _stop_assisting(shell: InteractiveShell) -> None:
    if rank_matcher in shell.Completer.custom_matchers:
        shell.Completer.custom_matchers.remove(rank_matcher)
        shell.events.unregister("post_run_cell", completion.after_cell)
    completion.forget()
    kernel_requests.uninstall()
