"""What loading and unloading the extension does."""

from __future__ import annotations

from IPython.core.interactiveshell import InteractiveShell

from axon_nb.cluster import current, journal, kept, lifecycle, stop_button, warmup
from axon_nb.cluster.settings import settings
from axon_nb.errors import AxonError
from axon_nb.magics.cells import CellMagics
from axon_nb.magics.data import DataMagics
from axon_nb.magics.distributed import DistributedMagics
from axon_nb.magics.transform import awaited_cells
from axon_nb.magics.views import ViewMagics

__all__ = ["load", "unload"]

_CLASSES = (CellMagics, DataMagics, DistributedMagics, ViewMagics)


def load(shell: InteractiveShell) -> None:
    """Register the magics; say in one line if a cluster waits for this notebook, else warm up."""
    for cls in _CLASSES:
        shell.register_magics(cls)
    if awaited_cells not in shell.input_transformers_cleanup:
        shell.input_transformers_cleanup.append(awaited_cells)
    shell.events.register("post_run_cell", journal.ran)
    lifecycle.install()
    stop_button.install()
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
    if awaited_cells in shell.input_transformers_cleanup:
        shell.input_transformers_cleanup.remove(awaited_cells)
    if journal.ran in shell.events.callbacks["post_run_cell"]:
        shell.events.unregister("post_run_cell", journal.ran)
    stop_button.uninstall()
    manager = shell.magics_manager
    for cls in _CLASSES:
        manager.registry.pop(cls.__name__, None)
        for kind, names in cls.magics.items():
            for name in names:
                manager.magics[kind].pop(name, None)
