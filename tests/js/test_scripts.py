"""Modules are joined into one script for each view, or refused."""

from __future__ import annotations

from graphlib import CycleError
from pathlib import Path

import pytest

from axon_nb.widgets import assets
from tests.support.node import node, saved

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
