"""The panels that follow a cluster: each is opened once for what it shows."""

from __future__ import annotations

from collections.abc import Sequence

from IPython.core.getipython import get_ipython

from axon_nb.cluster.cluster import Cluster
from axon_nb.cluster.layouts import ask_layouts
from axon_nb.widgets.shard_page import shards_bundle
from axon_nb.widgets.shard_tensors import put_together

__all__ = ["show_shards"]

_shards_panels: dict[tuple[str, ...], object] = {}


def show_shards(cluster: Cluster, names: Sequence[str], *, gradients: bool = False) -> None:
    """Show which rank holds which part of tensors: a panel in a notebook, text elsewhere.

    Args:
        cluster: Whose ranks are asked.
        names: Modules, optimizers, tensors of the ranks, by name.
        gradients: Whether gradients are shown besides parameters.

    Raises:
        UsageError: there is nothing of that name to show.
    """
    shell = get_ipython()
    if shell is None or not hasattr(shell, "kernel"):
        shards, notes = ask_layouts(cluster.state, names, gradients=gradients)
        print(shards_bundle(", ".join(names), put_together(shards), notes)["text/plain"])
        return
    from axon_nb.widgets.shards_panel import ShardsPanel

    panel = ShardsPanel(cluster, names, gradients=gradients)
    earlier = _shards_panels.pop(tuple(names), None)
    if isinstance(earlier, ShardsPanel):
        earlier.close()
    panel.open(shell)
    _shards_panels[tuple(names)] = panel
