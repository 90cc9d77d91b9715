"""What if of `%memory`, and `result.show()`, in JupyterLab on a real cluster: asked by hand, looked at, saved."""

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
from axon_nb.parallel import FSDP
from axon_nb.parallel.models import GPT, GPTConfig, next_byte_loss
torch.manual_seed(0)
model = FSDP(GPT(GPTConfig(blocks=2)))
optimizer = model.optimizer(torch.optim.AdamW)"""
STEP = """%%distributed --watch --out result
tokens = torch.randint(0, 256, (4, 65))
for _ in range(5):
    next_byte_loss(model(tokens[:, :-1]), tokens[:, 1:]).backward()
    optimizer.step()
    optimizer.zero_grad()
    dist.barrier()"""
PART = ".axon-memory-what-if"
ANSWER = ".axon-memory-answer"


def _picture(page: LabPage, name: str, selector: str) -> None:
    """Where a person wants to look at it, in both themes."""
    if folder := os.environ.get("AXON_NB_SCREENSHOTS"):
        for dark in (False, True):
            page.set_theme(dark=dark)
            page.page.locator(selector).first.scroll_into_view_if_needed()
            page.page.locator(selector).first.screenshot(path=f"{folder}/{name}-{'dark' if dark else 'light'}.png")
        page.set_theme(dark=False)


def _wait_answer(page: LabPage, *words: str) -> str:
    condition = "([s, words]) => words.every((word) => document.querySelector(s).textContent.includes(word))"
    page.wait_until(condition, [ANSWER, list(words)])
    return page.page.locator(ANSWER).inner_text()


def _ask(page: LabPage) -> None:
    ranks = page.page.locator(f"{PART} input[name=world_size]")
    batch = page.page.locator(f"{PART} input[name=batch]")
    assert (ranks.input_value(), batch.input_value()) == ("2", "4")
    ranks.fill("8")
    ranks.press("Tab")
    _wait_answer(page, "on 8 ranks")
    page.page.locator(f"{PART} select[name=strategy]").select_option("ddp")
    _wait_answer(
        page, "ddp on 8 ranks, adamw, batch 4", *(("simulated",) if "AXON_NB_SCREENSHOTS" in os.environ else ())
    )
    labels = page.page.locator(f"{PART} .axon-memory-row[data-label] > span:first-child").all_inner_texts()
    assert labels[:3] == ["current, after a step", "current, at the peak", "proposed, after a step"]
    assert page.page.locator(f"{PART} i[data-role=activations]").count() > 0
    _picture(page, "what-if", ".axon-memory")
    page.page.locator(f"{PART} label[data-name=shard]").wait_for(state="hidden")
    batch.fill("0")
    batch.press("Tab")
    page.page.locator(".axon-memory-error", has_text="must be an integer from 1").wait_for()
    _picture(page, "what-if-error", ".axon-memory")
    page.page.get_by_role("button", name="reset").click()
    _wait_answer(page, "full_shard on 2 ranks", "simulated")
    assert (ranks.input_value(), batch.input_value()) == ("2", "4")
    page.wait_until("(s) => document.querySelector(s).disabled", ".axon-memory-reset")


def test_what_if_is_answered_and_results_reopen(lab: LabServer, page: LabPage) -> None:
    cells = ["%load_ext axon_nb\n%distributed start -n 2", MODEL, "%memory model", STEP, "result.show()"]
    lab.write_notebook("what_if.ipynb", [*cells, "%distributed stop"])
    page.open_notebook("what_if.ipynb")
    for i in range(3):
        page.run_and_wait(i)
    # Until the model has been called there is a formula.
    assert "on 2 ranks" in _wait_answer(page, "model states only")
    page.run_and_wait(3)
    assert "adamw, batch 4" in _wait_answer(page, "full_shard on 2 ranks", "peak", "simulated")
    page.page.locator(".axon-memory-estimated [data-role=optimizer]").first.wait_for(state="attached")
    page.page.locator(".axon-memory-estimated .axon-memory-peak").first.wait_for(state="attached")
    _ask(page)
    # The result of a cell shows its views again.
    page.run_and_wait(4)
    strip, timeline = (page.output(4).locator(f"{name}-canvas") for name in (".axon-strip", ".axon-timeline"))
    strip.first.wait_for()
    timeline.first.wait_for()
    page.wait_until("() => Number(document.querySelector('.axon-timeline-canvas').dataset.found) > 20")
    page.wait_text(4, "optimizer")
    assert "no kernel" not in page.output_text(4)
    _picture(page, "show", ".jp-Notebook [data-windowed-list-index='4']")
    page.run_and_wait(5)
    saved = page.save()
    for i, words in ((2, "plan: full_shard on 2 ranks"), (4, "rank 1")):
        bundles = [output.data for output in saved.cells[i].outputs if output.output_type == "display_data"]
        assert words in "".join("".join(bundle.get("text/plain", "")) for bundle in bundles)
        html = "".join("".join(bundle.get("text/html", "")) for bundle in bundles)
        assert "data:image/svg+xml;base64," in html
        assert "<script" not in html
    assert len(nbformat.writes(saved)) < 600_000
