"""Each view's script in a bare page, as anywidget runs it: it draws what it is given, tells that it is there, ends."""

from __future__ import annotations

import base64
import json
from typing import TYPE_CHECKING, Any

import pytest

from axon_nb.cluster.inspection.span_store import SpanStore
from axon_nb.records.spans import Span
from axon_nb.records.telemetry import Activity, RankState
from axon_nb.widgets.assets import script, style
from axon_nb.widgets.cell.segments import Clock, RankHistory, encode
from axon_nb.widgets.cell.strip import RankStrip
from axon_nb.widgets.memory.view import MemoryView
from axon_nb.widgets.palette import SPAN_CODES, paints_for_page
from axon_nb.widgets.shards.view import ShardsView
from axon_nb.widgets.timeline.wire import pack
from axon_nb.widgets.watch.view import WatchView
from tests.support.jobs import answers, report, row
from tests.support.lab_server import LIMIT
from tests.support.memory_replies import answers as memory_answers
from tests.support.memory_replies import use
from tests.support.shard_records import split

if TYPE_CHECKING:
    from pathlib import Path

    from playwright.sync_api import Browser, Page

pytestmark = [pytest.mark.browser, pytest.mark.timeout(900)]

PAGE = """<!DOCTYPE html><style>{style}</style><div id="el"></div><script type="module">
{script}
const traits = JSON.parse({traits});
for (const chart of traits.content?.charts ?? []) chart.points = undefined;
window.sent = [];
window.handlers = {{}};
const model = {{
  get: (name) => traits[name],
  on: (name, handler) => (handlers[name] = handler),
  off: (name) => delete handlers[name],
  send: (message) => sent.push(message),
}};
const el = document.getElementById("el");
const made = make();
const closed = made.initialize?.({{ model }});
const gone = made.render({{ model, el }});
window.append = (text) => {{
  const bytes = Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));
  handlers["msg:custom"]({{ op: "append" }}, [new DataView(bytes.buffer)]);
}};
window.end = () => {{
  gone();
  closed?.();
  el.replaceChildren();
  return Object.keys(handlers).length;
}};
</script>"""


def open_page(browser: Browser, folder: Path, name: str, traits: dict[str, Any]) -> Page:
    """A page with one view; an error in it is kept in the list `page_errors`."""
    path = folder / f"{name}.html"
    code = script(name).replace("export default ", "const make = ")
    told = json.dumps(json.dumps(traits, default=lambda _: None))
    path.write_text(PAGE.format(style=style(name), script=code, traits=told), encoding="utf-8")
    page = browser.new_page(offline=True)
    page.set_default_timeout(LIMIT * 1000)
    page.goto(path.as_uri())
    return page


def strip_message() -> bytes:
    """Two ranks, one of which waits."""
    histories = [RankHistory(0), RankHistory(1)]
    for history in histories:
        history.add(RankState(history.rank, Activity.RUNNING, 0, line=2), now=0.5, since=0.25)
    histories[1].add(RankState(1, Activity.WAITING, 0, line=3, call="all_reduce"), now=1.5, since=1.0)
    return encode(histories, Clock(now=2.0, lost=0, finished=False), starts=[0, 0])


def timeline_message() -> bytes:
    """Two ranks with a forward and a collective each."""
    store = SpanStore()
    for rank in range(2):
        store.add([Span(rank, "forward", "GPT", 0, 10**9), Span(rank, "collective", "all_reduce", 10**9, 2 * 10**9)])
    table = store.table()
    header = {
        "labels": [[SPAN_CODES[kind], name, group] for kind, name, group in table.labels],
        "labelsFrom": 0,
        "groups": {},
        "oldest": 0,
        "dropped": 0,
        "lost": 0,
        "now": 2.0,
        "number": 7,
        "focus": [0.0, 2.0],
        "finished": False,
        "restart": True,
    }
    return pack(table, header, origin_ns=0)


def contents() -> dict[str, dict[str, Any]]:
    """What the kernel sides of the views without messages draw."""
    watch, memory = WatchView(lambda: None), MemoryView("model")
    watch.add([answers(report(0, [row(0, loss=2.0)]), report(1, [row(0, loss=3.0)]))], 0.0)
    memory.show(memory_answers(use(0), use(1)))
    shards = ShardsView("model", split((8, 6), (2, 2), (0, 1)))
    found = {}
    for name, view in (("watch", watch), ("memory", memory), ("shards", shards)):
        if name != "shards":
            view.refresh(unseen=True)
        state = view.get_state()
        found[name] = {key: value for key, value in state.items() if not key.startswith("_")}
        view.close()
    return found


@pytest.mark.parametrize(
    ("name", "words"),
    [("watch", "loss 2.5"), ("memory", "170 MiB"), ("shards", "rows over dp (2), columns over tp (2)")],
)
def test_a_view_of_content_draws_says_that_it_is_there_and_ends(
    chromium: Browser, tmp_path: Path, name: str, words: str
) -> None:
    page = open_page(chromium, tmp_path, name, contents()[name])
    errors: list[str] = []
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.get_by_text(words).first.wait_for()
    page.wait_for_function("() => sent.some((message) => message.op === 'heartbeat')")
    page.evaluate("handlers['change:content']()")
    assert page.evaluate("end()") == 0
    assert errors == []
    page.close()


@pytest.mark.parametrize("name", ["strip", "timeline"])
def test_a_view_of_messages_draws_answers_and_ends(chromium: Browser, tmp_path: Path, name: str) -> None:
    if name == "strip":
        view = RankStrip([0, 1], title="In [1]")
        config: Any = view.config
        view.close()
        message, drawn = strip_message(), "segments === '3'"
    else:
        config = {"ranks": [0, 1], "title": "In [1]", "paints": paints_for_page()}
        message, drawn = timeline_message(), "found === '4'"
    page = open_page(chromium, tmp_path, name, {"config": config, "snapshot": None})
    errors: list[str] = []
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.locator(f".axon-{name}").wait_for()
    page.evaluate("(text) => append(text)", base64.b64encode(message).decode())
    page.wait_for_function(f"() => document.querySelector('.axon-{name}-canvas').dataset.{drawn}")
    if name == "timeline":
        page.wait_for_function("() => sent.some((message) => message.op === 'ack' && message.number === 7)")
    # Marked with the mouse, the stretch is all that is shown; Home shows everything again.
    canvas = page.locator(f".axon-{name}-canvas")
    box = canvas.bounding_box()
    assert box is not None
    page.mouse.move(box["x"] + 10, box["y"] + 8)
    page.mouse.down()
    page.mouse.move(box["x"] + box["width"] / 4, box["y"] + 8)
    page.mouse.up()
    shown = f"document.querySelector('.axon-{name}-canvas').dataset.view"
    view = f"const [from, to] = {shown}.split(',').map(Number);"
    page.wait_for_function(f"() => {{ {view} return from > 0.01; }}")
    marked = page.evaluate(f"() => {{ {view} return to - from; }}")
    canvas.press("Home")
    page.wait_for_function(f"(marked) => {{ {view} return from === 0 && to > 3 * marked; }}", arg=marked)
    assert page.evaluate("end()") == 0
    assert errors == []
    page.close()
