"""`%shards` in JupyterLab: on a real cluster, live while a cell runs, saved with the notebook."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import nbformat
import pytest

if TYPE_CHECKING:
    from tests.support.browser.lab_page import LabPage
    from tests.support.browser.lab_server import LabServer

pytestmark = [pytest.mark.browser, pytest.mark.timeout(900)]

MODEL = """%%distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from axon_nb.parallel.models import GPT, GPTConfig
mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
model = GPT(GPTConfig(blocks=2))
plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
for name in ("block0", "block1"):
    parallelize_module(model.get_submodule(name), mesh["tp"], plan)
    fully_shard(model.get_submodule(name), mesh=mesh["dp"])
_ = fully_shard(model, mesh=mesh["dp"])"""
GATHER = """%%distributed
import time
from pathlib import Path
for block in (model.block0, model.block1):
    block.unshard()
while not Path(STOP).exists():
    time.sleep(0.05)"""
RESHARD = """%%distributed
for block in (model.block0, model.block1):
    block.reshard()"""
GATHERED = (
    "[...document.querySelectorAll('.axon-shards tbody tr[data-name]')].filter((row) => /gathered/.test(row.innerText))"
)
PICTURE = "document.querySelectorAll('.jp-Notebook .jp-CodeCell')[2].querySelector('details').textContent"


def _rows(page: LabPage, kind: str = "") -> int:
    chosen = f'[data-kind="{kind}"]' if kind else ""
    return page.page.locator(f".axon-shards tbody tr[data-name]{chosen}").count()


def _picture(page: LabPage, name: str) -> None:
    """Where a person wants to look at it."""
    if folder := os.environ.get("AXON_NB_SCREENSHOTS"):
        page.page.locator(".axon-shards").first.screenshot(path=f"{folder}/{name}.png")


def test_shards_are_drawn_follow_a_gather_and_are_saved(lab: LabServer, page: LabPage) -> None:
    stop = lab.notebooks / "shards.stop"
    gather = GATHER.replace("STOP", repr(str(stop)))
    cells = ["%load_ext axon_nb\n%distributed start -n 4", MODEL, "%shards model", gather, RESHARD]
    lab.write_notebook("shards.ipynb", [*cells, "%distributed stop"])
    page.open_notebook("shards.ipynb")
    for i in range(3):
        page.run_and_wait(i)
    page.page.wait_for_selector(".axon-shards tbody tr[data-name]")
    page.page.locator(".axon-shards-heading", has_text="on 4 ranks").wait_for()
    every = _rows(page)
    assert every == _rows(page, "sharded") > 8
    up = page.page.locator('.axon-shards tr[data-name="block0.up.weight"]')
    assert "rows over dp (2), rows over tp (2)" in up.inner_text()
    said = up.locator("svg[role=img]").get_attribute("aria-label") or ""
    assert "rank 3: [192:256, :], 64 × 64, 16.0 KiB, cpu" in said
    _picture(page, "shards-list")
    page.page.fill(".axon-shards input", "block1 columns")
    assert _rows(page) == 1
    page.page.locator(".axon-shards tbody tr[data-name]").press("Enter")
    assert page.page.locator(".axon-shards-details li").count() == 4
    page.page.fill(".axon-shards input", "")
    page.page.get_by_role("button", name="by bytes").click()
    assert page.page.locator(".axon-shards-map .axon-shards-tile").count() > every, "blocks that are alike are one row"
    _picture(page, "shards-map")
    page.page.get_by_role("button", name="list", exact=True).click()
    page.run_cell(3)
    # Live: while the cell runs two blocks are gathered; this may show one after the other.
    page.wait_until(
        f"() => {GATHERED}.length > 8 && document.querySelector('.axon-shards tr.axon-shards-changed') !== null"
    )
    assert page.is_running(3)
    assert "gathered for now, sharded at rest" in up.inner_text()
    _picture(page, "shards-gathered")
    stop.touch()
    page.wait_done(3)
    # What was shown while the cell ran is what the picture shows afterwards.
    page.wait_until(f"() => {PICTURE}.includes('gathered for now')")
    page.run_and_wait(4)
    page.wait_until(f"() => {GATHERED}.length === 0 && !{PICTURE}.includes('gathered for now')")
    page.save()
    stop.unlink()
    page.run_cell(3)
    page.wait_until(f"() => {GATHERED}.length > 8")
    page.reload()
    page.wait_until("(n) => document.querySelectorAll('.axon-shards tbody tr[data-name]').length === n", every)
    stop.touch()
    page.run_and_wait(4)
    page.run_and_wait(5)
    saved = page.save()
    bundles = [output["data"] for output in saved.cells[2].outputs if output.output_type == "display_data"]
    html = "".join("".join(bundle.get("text/html", "")) for bundle in bundles)
    assert "data:image/svg+xml;base64," in html
    assert "gathered for now" not in html
    assert len(nbformat.writes(saved)) < 400_000
