"""Completions and help from ranks in JupyterLab."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.browser.lab_page import LabPage
    from tests.browser.lab_server import LabServer

pytestmark = [pytest.mark.browser, pytest.mark.timeout(180)]

SETUP = """%%distributed
class Recipe:
    \"\"\"How to train.\"\"\"
    steps_of_training = 10
recipe = Recipe()"""


def _type_at_end(page: LabPage, i: int, text: str) -> None:
    page.cell(i).locator(".cm-content").click()
    page.page.keyboard.press("Control+End")
    page.page.keyboard.type(text)


def test_the_ranks_names_are_completed_and_explained(lab: LabServer, page: LabPage) -> None:
    lab.write_notebook(
        "typed.ipynb",
        ["%load_ext axon_nb\n%distributed start -n 2", SETUP, "%%distributed\n", "%distributed stop"],
    )
    page.open_notebook("typed.ipynb")
    page.run_and_wait(0)
    page.run_and_wait(1)
    _type_at_end(page, 2, "recipe.steps_of")
    page.page.keyboard.press("Tab")
    offered = page.page.locator(".jp-Completer").get_by_text("steps_of_training")
    offered.first.wait_for(timeout=60_000)
    page.page.keyboard.press("Enter")
    page.cell(2).locator(".cm-content").get_by_text("recipe.steps_of_training").wait_for(timeout=60_000)
    page.page.keyboard.press("Control+End")
    page.page.keyboard.press("Enter")
    page.page.keyboard.type("Recipe")
    page.command("tooltip:launch-notebook")
    page.page.locator(".jp-Tooltip").get_by_text("How to train.").first.wait_for(timeout=60_000)
    page.run_and_wait(3)
