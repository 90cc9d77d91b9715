"""What loading and unloading the extension does."""

from __future__ import annotations

import threading

from IPython.core.interactiveshell import InteractiveShell
from IPython.core.magic import Magics

from axon_nb.cluster import current, journal, kept, lifecycle, stop_button, warmup
from axon_nb.cluster.settings import settings
from axon_nb.errors import AxonError
from axon_nb.magics import front_end, rank_names
from axon_nb.magics.arguments import telling_help
from axon_nb.magics.auto import AutoMagics, auto_cells
from axon_nb.magics.cells import CellMagics
from axon_nb.magics.completion import rank_matcher
from axon_nb.magics.data import DataMagics
from axon_nb.magics.distributed import DistributedMagics
from axon_nb.magics.heads import auto_mode
from axon_nb.magics.job_views import JobViewMagics
from axon_nb.magics.timeline import TimelineMagics
from axon_nb.magics.transform import asked_help, awaited_cells
from axon_nb.magics.views import ViewMagics

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
    shell.events.register("post_run_cell", journal.ran)
    lifecycle.watch_shutdown()
    stop_button.install()
    settings.acting["warm_up"] = _warm
    if current.get() is not None:
        return
    try:
        waiting = kept.mine()
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
        warmup.begin()


def unload(shell: InteractiveShell) -> None:
    """Take back what `load` registered."""
    for transformer in _TRANSFORMERS:
        if transformer in shell.input_transformers_cleanup:
            shell.input_transformers_cleanup.remove(transformer)
    settings.acting.pop("warm_up", None)
    auto_mode.on = False
    _stop_assisting(shell)
    if journal.ran in shell.events.callbacks["post_run_cell"]:
        shell.events.unregister("post_run_cell", journal.ran)
    stop_button.uninstall()
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
        threading.Thread(target=warmup.discard, name="axon_nb-cool-down", daemon=True).start()
    elif current.get() is None:
        warmup.begin()


def _tell_help(shell: InteractiveShell, cls: type[Magics]) -> None:
    magics = shell.magics_manager.magics["line"]
    for name in cls.magics.get("line", ()):
        magics[name] = telling_help(magics[name])


def _assist(shell: InteractiveShell) -> None:
    if rank_matcher not in shell.Completer.custom_matchers:
        shell.Completer.custom_matchers.append(rank_matcher)
        shell.events.register("post_run_cell", rank_names.after_cell)
    front_end.install()


def _stop_assisting(shell: InteractiveShell) -> None:
    if rank_matcher in shell.Completer.custom_matchers:
        shell.Completer.custom_matchers.remove(rank_matcher)
        shell.events.unregister("post_run_cell", rank_names.after_cell)
    rank_names.forget()
    front_end.uninstall()
