"""The line about who is waited for: where it can be changed it is, elsewhere it comes seldom."""

from __future__ import annotations

from typing import Any

from axon_nb.cluster.output.sinks import WaitNotice


class Page:
    """Keeps what is shown, as a notebook does."""

    def __init__(self, *, in_place: bool) -> None:
        self.in_place = in_place
        self.displays: dict[str | None, str] = {}
        self.updates = 0
        self.printed: list[str] = []

    def stream(self, name: str, text: str) -> None:
        self.printed.append(text)

    def display(self, data: dict[str, Any], metadata: dict[str, Any], *, display_id: str | None, update: bool) -> None:
        assert update == (display_id in self.displays)
        self.displays[display_id] = data["text/plain"]
        self.updates += 1

    def clear(self, *, wait: bool) -> None:
        self.displays.clear()


def test_wait_notice_updates_once_per_second_and_is_cleared() -> None:
    page = Page(in_place=True)
    notice = WaitNotice(page)
    for tenth in range(31):
        notice.show(f"slow for {tenth}", tenth / 10)
    assert list(page.displays.values()) == ["slow for 30"]
    assert page.updates == 4
    notice.show("", 3.2)
    assert list(page.displays.values()) == [""]
    notice.hide()
    assert page.updates == 5


def test_new_waits_move_the_notice_down_a_bounded_number_of_times() -> None:
    page = Page(in_place=True)
    notice = WaitNotice(page)
    for second in range(40):
        notice.show("slow", float(second))
        notice.hide()
    assert len(page.displays) == 10
    assert set(page.displays.values()) == {""}


def test_terminal_gets_few_lines() -> None:
    page = Page(in_place=False)
    notice = WaitNotice(page)
    for second in range(301):
        notice.show(f"slow for {second} s", float(second))
    notice.hide()
    assert page.printed == ["slow for 0 s\n", "slow for 30 s\n", "slow for 300 s\n"]
    assert not page.displays
