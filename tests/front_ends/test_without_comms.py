"""A front end that shows no widgets and answers no comm message: pictures and text, and never a failure."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.cell_output import by_rank
from tests.support.kernel import Kernel, Reply

WIDGET = "application/vnd.jupyter.widget-view+json"
MODEL = "%%distributed\nmodel = torch.nn.Linear(8, 4)\noptimizer = torch.optim.AdamW(model.parameters())"
STEP = """%%distributed{options}
import axon_nb
for _ in axon_nb.progress(range(3), desc="steps"):
    loss = model(torch.ones(2, 8)).square().mean()
    loss.backward()
    optimizer.step()
    axon_nb.log(loss=loss)
    dist.barrier()
"""


@pytest.fixture(scope="module")
def plain() -> Iterator[Kernel]:
    """A kernel with 2 ranks whose client, as in all these tests, has never heard of widgets."""
    with Kernel() as kernel:
        kernel.ok("%load_ext axon_nb\n%distributed start -n 2")
        kernel.ok(MODEL)
        yield kernel


def shown(reply: Reply) -> list[dict[str, Any]]:
    """What such a front end can show, of each output that is there; a widget above its picture has no text."""
    assert reply.ok, reply.traceback
    assert reply.stderr == ""
    found = [{kind: text for kind, text in bundle.items() if kind != WIDGET} for bundle in reply.displays]
    return [bundle for bundle in found if bundle != {"text/plain": ""}]


def is_readable(bundle: dict[str, Any]) -> bool:
    """Whether it says something to a person."""
    if "data:image/svg+xml;base64," in bundle.get("text/html", "") or "<table" in bundle.get("text/html", ""):
        return True
    text = bundle.get("text/plain", "")
    return bool(text) and "(" not in text.partition(" ")[0]


@pytest.mark.parametrize("magic", ["%shards model", "%memory model optimizer", "%watch", "%timeline"])
def test_panels_are_pictures(plain: Kernel, magic: str) -> None:
    bundles = shown(plain.ok(magic))
    assert any("<img" in bundle.get("text/html", "") or "<table" in bundle.get("text/html", "") for bundle in bundles)
    assert all(map(is_readable, bundles)), bundles


def test_watched_cell_ends_as_a_picture(plain: Kernel) -> None:
    bundles = shown(plain.ok(STEP.format(options=" --watch")))
    assert sum("data:image/svg+xml;base64," in bundle.get("text/html", "") for bundle in bundles) >= 2
    assert all(map(is_readable, bundles)), bundles


def test_cells_run_with_undrawn_panels(plain: Kernel) -> None:
    plain.ok("%watch")
    reply = plain.ok(STEP.format(options=""))
    assert reply.stderr == ""
    assert by_rank(plain.ok("%%distributed\n'alive'").stdout) == {0: ["'alive'"], 1: ["'alive'"]}


def test_messages_of_closed_widgets_are_ignored(plain: Kernel) -> None:
    """As a page sends them that was open when the kernel was restarted."""
    message = plain.client.session.msg("comm_msg", {"comm_id": "none", "data": {"method": "update", "state": {}}})
    plain.client.shell_channel.send(message)
    info = plain.client.session.msg("comm_info_request", {"target_name": "jupyter.widget"})
    plain.client.shell_channel.send(info)
    assert by_rank(plain.ok("%%distributed\n'alive'").stdout) == {0: ["'alive'"], 1: ["'alive'"]}
