"""`%inside` in JupyterLab: of a split model on a real cluster, redrawn by later cells, and in the saved notebook."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import nbformat
import pytest

if TYPE_CHECKING:
    from playwright.sync_api import Locator

    from tests.support.browser.lab_page import LabPage
    from tests.support.browser.lab_server import LabServer

pytestmark = [pytest.mark.browser, pytest.mark.timeout(900), pytest.mark.needs("transformers")]

LETTERS = "abcdefghijklmnopqrstuvwxyz"
MODEL = """%%distributed
from axon_nb import inside
from transformers import AutoModelForCausalLM, LlamaConfig
from transformers.distributed import DistributedConfig

torch.manual_seed(0)
config = LlamaConfig(vocab_size=26, hidden_size=32, intermediate_size=64, num_hidden_layers=3, num_attention_heads=4,
                     num_key_value_heads=2, pad_token_id=None, bos_token_id=None, eos_token_id=None)
AutoModelForCausalLM.from_config(config).save_pretrained("inside_tiny")  # only rank 0 writes
dist.barrier()
split = DistributedConfig(tp_size=world_size, tp_plan="auto")
model = AutoModelForCausalLM.from_pretrained("inside_tiny", distributed_config=split, attn_implementation="eager")
letters = "LETTERS"
tokens = torch.arange(8).unsqueeze(0)""".replace("LETTERS", LETTERS)
RECORD = """%%distributed
places = ("layers.*", "layers.*.self_attn:attention", "layers.0.self_attn:heads", "layers.0.mlp")
with torch.no_grad(), inside.record(model, *places) as seen:
    model(tokens)"""
LENS = "%%distributed\n_ = inside.lens(model, seen, letters.__getitem__)"
GENERATE = """%%distributed
with torch.no_grad(), inside.record(model, *places) as seen:
    model.generate(tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=24, do_sample=False)
_ = inside.lens(model, seen, letters.__getitem__)"""
VIEW = 3


def _pictures(page: LabPage, view: Locator, name: str) -> None:
    """In both themes, where a person wants to look at it."""
    if folder := os.environ.get("AXON_NB_SCREENSHOTS"):
        for theme in ("dark", "light"):
            page.set_theme(dark=theme == "dark")
            view.screenshot(path=f"{folder}/{name}-{theme}.png")


def test_recording_is_drawn_redrawn_and_saved(lab: LabServer, page: LabPage) -> None:
    cells = ["%load_ext axon_nb\n%distributed start -n 2", MODEL, RECORD, "%inside seen", LENS, GENERATE]
    lab.write_notebook("inside.ipynb", [*cells, "%distributed stop"])
    page.page.set_viewport_size({"width": 1300, "height": 1800})
    page.open_notebook("inside.ipynb")
    for i in range(VIEW + 1):
        page.run_and_wait(i)
    page.wait_text(VIEW, "norms by token")
    view = page.output(VIEW)
    maps = view.locator("img[alt^='attention of head']")
    assert maps.count() == 3 * 4
    assert "logit lens" not in view.inner_text()
    page.run_and_wait(4)
    page.wait_text(VIEW, "logit lens")
    _pictures(page, view, "inside")
    page.run_and_wait(5)
    words = view.locator("th[title='position 9']")
    page.wait_until("(title) => document.querySelectorAll(`th[title='${title}']`).length === 2", "position 9")
    assert words.first.inner_text() in LETTERS, "of what was generated"
    _pictures(page, view, "inside-generated")
    page.run_and_wait(6)
    shown = view.inner_text()
    saved = page.save()
    saved.cells = saved.cells[VIEW : VIEW + 1]
    saved.metadata.clear()  # it names no kernel
    nbformat.write(saved, lab.notebooks / "inside-saved.ipynb")
    page.open_notebook("inside-saved.ipynb", kernel=False)
    page.wait_text(0, "logit lens")
    assert page.output(0).inner_text() == shown, "the saved picture is the last one"
    is_sharp = "(all) => all.every((image) => image.naturalWidth === image.width && image.width >= 64)"
    assert page.output(0).locator("img[alt^='attention of head']").evaluate_all(is_sharp), "no browser smooths maps"
    _pictures(page, page.output(0), "inside-saved")
    # The widget's model is gone with its kernel; Lab says so in the console.
    page.errors.clear()
