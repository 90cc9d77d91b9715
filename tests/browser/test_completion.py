"""Completions and help from ranks in JupyterLab."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.support.completion import ask_until, type_at_end

if TYPE_CHECKING:
    from tests.support.browser.lab_page import LabPage
    from tests.support.browser.lab_server import LabServer

pytestmark = [pytest.mark.browser, pytest.mark.timeout(900)]

SETUP = """%%distributed
class Recipe:
    \"\"\"How to train.\"\"\"
    steps_of_training = 10
recipe = Recipe()"""


def test_names_on_ranks_are_completed_and_explained(lab: LabServer, page: LabPage) -> None:
    lab.write_notebook(
        "typed.ipynb",
        ["%load_ext axon_nb\n%distributed start -n 2", SETUP, "%%distributed\n", "%distributed stop"],
    )
    page.open_notebook("typed.ipynb")
    page.run_and_wait(0)
    page.run_and_wait(1)
    type_at_end(page, 2, "recipe.steps_of")
    offered = ".jp-Completer :text('steps_of_training')"
    ask_until(page, 2, lambda: page.page.keyboard.press("Tab"), offered)
    page.page.keyboard.press("Enter")
    page.cell(2).locator(".cm-content").get_by_text("recipe.steps_of_training").wait_for()
    type_at_end(page, 2, "\nRecipe")
    explained = ".jp-Tooltip :text('How to train.')"
    ask_until(page, 2, lambda: page.command("tooltip:launch-notebook"), explained)
    page.run_and_wait(3)
