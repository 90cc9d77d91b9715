"""The panel in JupyterLab and its item of the status bar, also while the kernel is busy."""

from __future__ import annotations

import fcntl
import re
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from playwright.sync_api import Locator

    from tests.support.browser.lab_page import LabPage
    from tests.support.browser.lab_server import LabServer

pytestmark = [pytest.mark.browser, pytest.mark.timeout(900)]

START = "%load_ext axon_nb\n%distributed start -n 2"
HANG = """%%distributed
import time
while rank == 1 and not globals().get("go"): time.sleep(0.05)
dist.all_reduce(torch.ones(2))"""
_HIGHLIGHTED = "[...(CSS.highlights.get('axon-other-ranks') ?? [])].map(String).join('')"


def wait_status(page: LabPage, text: str) -> None:
    """Wait until the status bar says this of the ranks."""
    page.page.locator(".axon-status-item").get_by_text(text, exact=True).wait_for()


def panel(page: LabPage) -> Locator:
    """The panel, after a click on the status bar's item."""
    page.page.locator(".axon-status-item button").click()
    found = page.page.get_by_role("region", name="Ranks")
    found.locator("h2").wait_for()
    return found


def press(inside: Locator, name: str) -> None:
    """Press a button, when it is possible."""
    inside.locator("button[aria-disabled=false]").get_by_text(name, exact=True).click()


def stop(page: LabPage, ranks: Locator) -> None:
    """Press Stop, and confirm it."""
    press(ranks, "Stop")
    page.page.locator(".jp-Dialog").get_by_role("button", name="Stop").click()
    ranks.get_by_text("This notebook has no ranks.").wait_for()


def test_hanging_cell_is_explained_and_interrupted(lab: LabServer, page: LabPage) -> None:
    say = "%%distributed\nprint('from rank', rank)"
    lab.write_notebook("hanging.ipynb", [START, HANG, say])
    page.open_notebook("hanging.ipynb")
    assert page.page.locator(".axon-status-item").is_hidden()
    page.run_and_wait(0)
    wait_status(page, "2 ranks, idle")
    ranks = panel(page)
    assert ranks.locator("tbody tr").count() == 2
    assert ranks.get_by_text("Repair", exact=True).get_attribute("aria-disabled") == "true"

    page.run_cell(1)
    wait_status(page, "2 ranks, running In [2]")
    ranks.get_by_text("Waiting for rank 1 (line 3): rank 0 has been in all_reduce").wait_for()
    ranks.locator("tbody").get_by_text(re.compile(r"^waits for rank 1 ·\s[\d.]+\ss$")).wait_for()
    press(ranks, "Stacks")
    ranks.locator("pre", has_text="while rank == 1").wait_for()
    assert ranks.locator("pre").evaluate("(stacks) => stacks.scrollWidth - stacks.clientWidth") <= 0
    assert page.is_running(1), "nothing of this disturbs the cell"
    press(ranks, "Interrupt")
    page.wait_done(1)
    page.wait_text(1, "[rank 1] was interrupted at line 3")
    wait_status(page, "2 ranks, idle")
    assert ranks.locator("tbody").get_by_text("waits for").count() == 0, "the panel is as late as the status bar"

    said = ranks.get_by_text("Interrupted the cell on ranks")
    said.wait_for()
    page.run_cell(1)
    said.wait_for(state="hidden")  # of an earlier cell
    press(ranks, "Interrupt")
    page.wait_done(1)

    page.run_and_wait(2)
    ranks.locator("tbody button", has_text="1").click()
    page.wait_until(f"() => {_HIGHLIGHTED}.includes('[rank 0] from rank 0')")
    assert "[rank 1]" not in page.page.evaluate(_HIGHLIGHTED)
    ranks.locator("tbody button", has_text="1").click()
    assert page.page.evaluate(_HIGHLIGHTED) == ""

    lab.write_notebook("other.ipynb", ["1 + 1"])
    page.command("docmanager:open", {"path": "other.ipynb"})
    ranks.get_by_text("This notebook has no ranks.").wait_for()
    assert page.page.locator(".axon-status-item").is_hidden()
    ranks.get_by_role("button", name="Show hanging").click()
    ranks.get_by_text("2 ranks, idle (not this notebook)").wait_for()
    stop(page, ranks)


def test_kernel_that_does_not_reply_is_reported(lab: LabServer, page: LabPage) -> None:
    wait = "import ctypes\nheld = open('held')\nctypes.PyDLL(None).flock(held.fileno(), 2)"  # holds the GIL
    lab.write_notebook("silent.ipynb", [START, wait])
    page.open_notebook("silent.ipynb")
    page.run_and_wait(0)
    wait_status(page, "2 ranks, idle")
    ranks = panel(page)
    with open(lab.notebooks / "held", "w", encoding="utf-8") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        page.run_cell(1)
        wait_status(page, "2 ranks, no reply")
        ranks.get_by_text("The notebook of 'silent' did not reply within 5 s.").wait_for()
        assert ranks.get_by_text("Interrupt", exact=True).get_attribute("title") == "The notebook does not reply"
    wait_status(page, "2 ranks, idle")


COLLECT_TEXTS = """(selectors) => {
    window.texts = selectors.map((selector) => {
        const node = document.querySelector(selector), texts = [];
        new MutationObserver(() => texts.push(node.textContent))
            .observe(node, { childList: true, characterData: true, subtree: true });
        return texts;
    });
}"""
"""Keep all that parts of the page say from now on."""


def test_dead_rank_is_repaired_and_ranks_are_stopped(lab: LabServer, page: LabPage) -> None:
    die = "%%distributed --ranks 1\nimport os\nos._exit(3)"
    lab.write_notebook("dying.ipynb", [START, "%%distributed\nkept = rank", die, "%%distributed --ranks 0\nkept"])
    page.open_notebook("dying.ipynb")
    for i in range(3):
        page.run_and_wait(i)
    wait_status(page, "2 ranks, idle, rank 1 dead")
    ranks = panel(page)
    ranks.locator("tbody").get_by_text("dead: exited with code 3").wait_for()
    press(ranks, "Repair")
    ranks.get_by_text("Replaced rank 1").wait_for()
    wait_status(page, "2 ranks, idle")
    assert "0" in page.run_and_wait(3)

    page.restart_kernel()
    wait_status(page, "2 ranks, detached")
    ranks.get_by_text("Run `%distributed attach dying` in a notebook to reconnect.").wait_for()
    stop(page, ranks)

    page.page.evaluate(COLLECT_TEXTS, [".axon-status-item", ".jp-Cell-outputArea"])
    page.run_cell(0)
    page.wait_done(0)
    for texts in page.page.evaluate("window.texts"):
        counts = re.findall(r"Starting 2 ranks … (\d) of 2", " ".join(texts))
        assert (counts[0], counts[-1]) == ("0", "2"), "it says from the first to the last how many are there"
    page.page.wait_for_function("() => !document.querySelector('.jp-Cell-outputArea').innerText.includes('Starting')")
