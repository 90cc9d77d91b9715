"""The widgets' JavaScript: node runs its tests, reads what the kernel packs, and modules become one script a view."""

from __future__ import annotations

import json
from graphlib import CycleError
from pathlib import Path

import pytest

from axon_nb.cluster.inspection.spans import SpanStore
from axon_nb.records.spans import Span
from axon_nb.records.telemetry import Activity, RankState
from axon_nb.widgets import assets
from axon_nb.widgets.cell.activity import Clock, RankHistory, encode
from axon_nb.widgets.html import ACTIVITY_CODES, SPAN_CODES
from axon_nb.widgets.timeline.view import BYTES_PER_SPAN, pack
from axon_nb.widgets.watch.store import Point, pack_points
from tests.support.node import node, saved

HERE = Path(__file__).parent

READ = """
import { readFileSync } from "node:fs";
const [script, ...messages] = process.argv.slice(1);
const { decode, merge, newStore } = await import(`data:text/javascript,${encodeURIComponent(readFileSync(script))}`);
const store = newStore(2);
const whole = messages.map((path) => merge(store, decode(new DataView(Uint8Array.from(readFileSync(path)).buffer))));
console.log(JSON.stringify({ whole, ...store }));
"""


@pytest.mark.parametrize("path", sorted(HERE.glob("*.test.mjs")), ids=lambda path: path.name)
def test_script(path: Path) -> None:
    node("--test", str(path))


def test_browser_reads_what_the_kernel_packs(tmp_path: Path) -> None:
    histories = [RankHistory(0), RankHistory(5)]
    histories[0].add(RankState(0, Activity.RUNNING, 0, line=2), now=0.5, since=0.25)
    histories[1].add(RankState(5, Activity.RUNNING, 0, line=3), now=0.5, since=0.0)
    first = encode(histories, Clock(now=0.5, lost=0, finished=False), starts=[0, 0])
    histories[0].add(RankState(0, Activity.WAITING, 0, line=4, call="größte"), now=1.5, since=1.25)
    second = encode(histories, Clock(now=2.0, lost=7, finished=True), starts=[0, 1])
    messages = [tmp_path / "first", tmp_path / "second"]
    for path, content in zip(messages, (first, second), strict=True):
        path.write_bytes(content)
    store = json.loads(
        node("--input-type=module", "-e", READ, "--", saved("strip/store", tmp_path), *map(str, messages))
    )
    assert store["whole"] == [True, True]
    assert (store["now"], store["lost"], store["finished"], store["coarse"]) == (2.0, 7, True, 0)
    for history, row in zip(histories, store["rows"], strict=True):
        kept = [
            {
                **{name: getattr(segment, name) for name in ("start", "end", "since", "line", "low", "high", "call")},
                "activity": ACTIVITY_CODES[segment.activity],
                "mixed": segment.mixed,
            }
            for segment in history.segments
        ]
        assert row == {"generation": 0, "segments": kept}


READ_POINTS = """
import { readFileSync } from "node:fs";
const [script, path] = process.argv.slice(1);
const { decode } = await import(`data:text/javascript,${encodeURIComponent(readFileSync(script))}`);
console.log(JSON.stringify(decode(new DataView(Uint8Array.from(readFileSync(path)).buffer))));
"""


def test_browser_reads_the_points_of_a_curve(tmp_path: Path) -> None:
    points = [Point(0, 0.5, 1.0, 1.5), Point(4, -2.0, 0.0, 2.0), Point(8, 1.0, 1.0, 1.0)]
    packed = tmp_path / "points"
    packed.write_bytes(pack_points(points))
    read = json.loads(
        node("--input-type=module", "-e", READ_POINTS, "--", saved("watch/points", tmp_path), str(packed))
    )
    names = {"steps": "step", "lows": "low", "means": "mean", "highs": "high"}
    assert read == {column: [getattr(point, name) for point in points] for column, name in names.items()}


READ_TIMELINE = """
import { readFileSync } from "node:fs";
const [script, ...messages] = process.argv.slice(1);
const { decode, merge, newStore } = await import(`data:text/javascript,${encodeURIComponent(readFileSync(script))}`);
const store = newStore(1);
const whole = messages.map((path) => merge(store, decode(new DataView(Uint8Array.from(readFileSync(path)).buffer))));
const columns = {};
for (const [name, column] of Object.entries(store.columns)) columns[name] = [...column.subarray(0, store.count)];
console.log(JSON.stringify({ whole, columns, labels: store.labels, lost: store.lost }));
"""
HEADER = {"groups": {}, "oldest": 0, "dropped": 0, "now": 1.0, "focus": [None, None], "finished": False}
SECOND = 1_000_000_000


def test_browser_reads_the_timeline_that_the_kernel_packs(tmp_path: Path) -> None:
    store = SpanStore()
    store.set_groups({"größte": [0, 1]})
    store.add([Span(0, "collective", "all_reduce", 2 * SECOND, 5 * SECOND, "größte", 1 << 31, -1, -1, 1, 7)])
    labels = [[SPAN_CODES["collective"], "all_reduce", "größte"]]
    first = pack(store.table(), {**HEADER, "labels": labels, "labelsFrom": 0, "lost": 0}, origin_ns=SECOND)
    assert len(first) % 2 == 0
    store.add([Span(1, "collective", "all_reduce", 3 * SECOND, 5 * SECOND, "größte", 7, -1, -1, 1)])
    store.add([Span(1, "forward", "F", 6 * SECOND, 6 * SECOND, "1", 0, 2, 40_000, 0)])
    more = {**HEADER, "labels": [[SPAN_CODES["forward"], "F", "1"]], "labelsFrom": 1, "lost": 4}
    patches, _ = store.patches(0)
    second = pack(store.table(1), more, origin_ns=SECOND, patches=patches[:1])
    paths = [tmp_path / "first", tmp_path / "second"]
    for path, content in zip(paths, (first, second), strict=True):
        path.write_bytes(content)
    read = json.loads(
        node("--input-type=module", "-e", READ_TIMELINE, "--", saved("timeline/store", tmp_path), *map(str, paths))
    )
    assert read["whole"] == [True, True]
    assert read["labels"] == [*labels, *more["labels"]]
    assert read["lost"] == 4
    assert read["columns"] == {
        "start": [1, 2, 5],
        "duration": [3, 2, 0],
        "bytes": [1 << 31, 7, 0],
        "late": [1, 0, 0],
        "sequence": [1, 1, 0],
        "label": [0, 0, 1],
        "rank": [0, 1, 1],
        "line": [7, 0, 0],
        "stage": [-1, -1, 2],
        "microbatch": [-1, -1, 32767],
        "by": [1, 1, -1],
    }


@pytest.mark.parametrize("count", [0, 1, 7, 1000])
def test_packed_span_is_small(count: int) -> None:
    store = SpanStore()
    store.add(Span(0, "forward", "F", i, i + 1) for i in range(count))
    empty = len(pack(store.table(count), {}, origin_ns=0))
    assert len(pack(store.table(), {}, origin_ns=0)) <= empty + BYTES_PER_SPAN * count + 8


VIEWS = ("memory", "shards", "strip", "timeline", "watch")
LATER = ("timeline/tools/tools",)
"""Scripts that a page loads when they are used."""
MAX_BYTES = 60_000
"""Of one script."""

CALL = """
const { default: make } = await import(`file://${process.argv[1]}`);
console.log(make());
"""


@pytest.fixture
def static(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder of modules."""
    monkeypatch.setattr(assets, "_STATIC", tmp_path)
    return tmp_path


def write(folder: Path, **modules: str) -> None:
    """Write modules: `view__store` is `view/store.js`."""
    for name, text in modules.items():
        path = folder / f"{name.replace('__', '/')}.js"
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8")


@pytest.mark.parametrize("view", VIEWS)
def test_view_is_one_module_with_one_export(view: str, tmp_path: Path) -> None:
    lines = assets.script(view).splitlines()
    assert not [line for line in lines if line.startswith("import")]
    assert [line.split()[1] for line in lines if line.startswith("export ")] == ["default"]
    node("--check", saved(view, tmp_path))


@pytest.mark.parametrize("view", VIEWS)
def test_view_bundle_is_small(view: str) -> None:
    assert len(assets.script(view).encode()) <= MAX_BYTES
    assert len(assets.style(view).encode()) <= 25_000


@pytest.mark.parametrize("name", LATER)
def test_lazy_modules_are_small_and_complete(name: str, tmp_path: Path) -> None:
    text = assets.script(name)
    assert len(text.encode()) <= MAX_BYTES
    assert not [line for line in text.splitlines() if line.startswith("import")]
    node("--check", saved(name, tmp_path))


def test_every_module_belongs_to_a_view() -> None:
    static = Path(assets.__file__).parent / "static"
    used = {module.path for view in VIEWS for module in assets._in_order(f"{view}/view.js")}
    used |= {module.path for name in LATER for module in assets._in_order(f"{name}.js")}
    assert used == {path.relative_to(static).as_posix() for path in static.rglob("*.js")}


def test_modules_are_bundled_once_in_import_order(static: Path, tmp_path: Path) -> None:
    write(
        static,
        view__view="""// @ts-check
// What is drawn.

import { LEFT } from "./left.js";
import {
  RIGHT,
  both,
} from "../right.js";

/** @typedef {string} Text */

/**
 * Words.
 *
 * @returns {Text}
 */
export default () => /** @type {Text} */ (both(LEFT, RIGHT));
""",
        view__left="""import { BASE } from "../base.js";

export const LEFT = `${BASE} left`;
""",
        right="""import { BASE } from "./base.js";

export const RIGHT = `${BASE} right`;

export function both(...texts) {
  return texts.join(" //import ");
}
""",
        base="export const BASE = 'base';\n",
    )
    text = assets.script("view")
    assert text.count("const BASE") == 1
    assert "Words." not in text
    assert "Text" not in text
    path = tmp_path / "joined.mjs"
    path.write_text(text, encoding="utf-8")
    assert node("--input-type=module", "-e", CALL, "--", str(path)).strip() == "base left //import base right"


@pytest.mark.parametrize(
    ("imports", "other", "message"),
    [
        ('import { a } from "./other.js";', "export function a() {}\nconst own = 2;", "both declare own: rename"),
        ('import { a, b } from "./other.js";', "export const a = 1;\nconst b = 2;", "imports b, which other.js does"),
        ('import { a as b } from "./other.js";', "export const a = 1;", "without `as`, unlike"),
        ('import * as all from "./other.js";', "export const a = 1;", "in braces"),
        ('import all from "./other.js";', "export const a = 1;", "in braces"),
        ('import "./other.js";', "export const a = 1;", "in braces"),
        ('import { a } from "./other.js";', "const a = 1;\nexport { a };", "export declarations only"),
        ('import { a } from "./other.js";', "export const { a } = {};", "one name at a time"),
        ('import { a } from "./other.js";', "export class a {}\nexport default a;", "is a view"),
        ('import { a } from "./other.js";', "export const a = `one\n  two`;", "end a template on the line"),
    ],
)
def test_unsupported_module_syntax_is_rejected(static: Path, imports: str, other: str, message: str) -> None:
    write(static, view=f"{imports}\n\nconst own = 1;\nexport default own;\n", other=f"{other}\n")
    with pytest.raises(ValueError, match=message):
        assets.script("view")


def test_circular_imports_are_rejected(static: Path) -> None:
    write(
        static,
        view='import { a } from "./other.js";\n\nexport const b = a;\n',
        other='import { b } from "./view.js";\n\nexport const a = b;\n',
    )
    with pytest.raises(CycleError):
        assets.script("view")
