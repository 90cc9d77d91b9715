"""Write `docs/design/hooks.md` from the register of private hooks, `axon_nb/records/hooks.toml`.

`--check` writes nothing and fails if the page is out of date.
"""

from __future__ import annotations

import sys
from itertools import groupby

from axon_nb.engine.self_test.catalog import CHECKS
from axon_nb.records import hooks
from scripts.generated_page import ROOT, write_or_check

TARGET = ROOT / "docs" / "design" / "hooks.md"

HEAD = """\
# Private hooks

Rooms: all that use private parts of other packages, which may change without notice. The register is
`axon_nb/records/hooks.toml`; this page, which `scripts/hooks_table.py` generates, shows it by package.

- **`missing_hooks(group)`** (`axon_nb/records/hooks.py`) names the parts of a hook that the installed versions lack.
  Every fallback asks it, so that the register and the code cannot disagree.
- **The self-test** ([recovery.md](recovery.md)) tries what recovery needs for real. For a hook with a *check*, that
  check says what is lost.
- **`axon-nb doctor`** walks the register and shows hooks that are missing, with what is lost. It leaves out packages
  that only cells import.
- **Two tests.** `tests/engine/test_self_test.py` walks the register with the installed versions; `make versions` runs
  it with each torch. `tests/structure/test_hooks.py` finds private names in the code that have no entry.

To add a hook, add a table to the register and run `make fix`. In the tables, *lost* is what users lose without it, and
*versions* are the package's versions that need it, if not all. Each hook links to the issue or pull request upstream
that changed it or would make it unnecessary, else to its source.
"""


def _lost(hook: hooks.Hook) -> str:
    check = next((check for check in CHECKS if check.name == hook.capability), None)
    return hook.lost if check is None else f"check `{check.name}`: {check.lost}"


def _versions(hook: hooks.Hook) -> str:
    bounds = [f"from {hook.since}" if hook.since else "", f"before {hook.before}" if hook.before else ""]
    return ", ".join(filter(None, bounds))


def _upstream(hook: hooks.Hook) -> str:
    name = hook.upstream.rpartition("/")[2]
    return f" ([{f'#{name}' if name.isdecimal() else name}]({hook.upstream}))"


def _row(hook: hooks.Hook) -> str:
    files = "<br>".join(f"`{file.removeprefix('axon_nb/')}`" for file in hook.files[:3])
    more = f"<br>and {len(hook.files) - 3} more" if len(hook.files) > 3 else ""
    cells = (f"`{hook.group}`", f"{hook.replaces}{_upstream(hook)}", _lost(hook), _versions(hook), files + more)
    return f"| {' | '.join(cells)} |"


def render() -> str:
    """Render `docs/design/hooks.md`."""
    found = [hooks.hook(group) for group in hooks.groups()]
    packages = list(dict.fromkeys(hook.package for hook in found))
    found.sort(key=lambda hook: packages.index(hook.package))
    parts = [HEAD.rstrip()]
    for package, own in groupby(found, key=lambda hook: hook.package):
        tested = ", ".join(hooks.tested_versions(package))
        table = ["| hook | replaces or reads | lost | versions | files |", "|---|---|---|---|---|", *map(_row, own)]
        parts += [f"## {package}\n\nChecked with {tested}.", "\n".join(table)]
    return "\n\n".join(parts) + "\n"


def main(argv: list[str] | None = None) -> int:
    """Write the page; return 1 if `--check` finds it out of date."""
    return write_or_check(TARGET, render, __doc__, argv)


if __name__ == "__main__":
    sys.exit(main())
