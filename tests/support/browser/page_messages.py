"""What a page sends to the widgets of a kernel, as Jupyter's widget manager sends it."""

from __future__ import annotations

from typing import Any

from tests.support.kernel import Kernel, Reply

CLOSE_PANELS = """
from axon_nb.cluster.session import current
for t_panel in list(current.session().panels.values()):
    t_panel.close()
current.session().panels.clear()"""
"""A cell that closes all panels: those that stay open go on updating their pictures in the cells of other tests."""


def model_of(reply: Reply) -> str:
    """The model of the first widget that a cell shows."""
    kind = "application/vnd.jupyter.widget-view+json"
    return str(next(bundle[kind]["model_id"] for bundle in reply.displays if kind in bundle))


def send_from_page(kernel: Kernel, model: str, content: dict[str, Any]) -> None:
    """Send a custom message to a widget; nothing answers it."""
    data = {"method": "custom", "content": content}
    kernel.client.shell_channel.send(kernel.client.session.msg("comm_msg", {"comm_id": model, "data": data}))
