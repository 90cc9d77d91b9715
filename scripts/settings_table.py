"""Write `docs/settings.md` from the docstrings of the settings and of the environment variables.

`--check` only says whether it is up to date. The settings are in `axon_nb/cluster/settings.py`, the variables in
`axon_nb/records/environment.py`.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

from axon_nb.cluster.settings import Settings
from axon_nb.records import environment
from scripts.generated_page import ROOT, write_or_check

TARGET = ROOT / "docs" / "settings.md"
SETTINGS = ROOT / "axon_nb" / "cluster" / "settings.py"
VARIABLES = ROOT / "axon_nb" / "records" / "environment.py"

HEAD = """\
# Settings

`%distributed config` lists all settings with what each does, and marks those whose value differs in the cluster.
`%distributed config keep_alive=10min output_limit=4MiB` changes settings; if one value is wrong, none changes. The
output says what is now set and, while a cluster is running, when it takes effect.

Durations are in seconds unless a unit follows (`ms`, `s`, `min`, `h`, `d`), sizes in bytes (`KiB`, `MiB`, `GiB`, `kB`,
`MB`, `GB`).

Settings last as long as the kernel. After a restart of the kernel, `%distributed attach` restores those that the
cluster keeps; a value already set in the new kernel takes precedence. The cluster keeps
{kept}.

To set them for all notebooks, add lines such as `c.AxonNB.keep_alive = "10min"` to IPython's configuration file,
`~/.ipython/profile_default/ipython_config.py`. `%load_ext axon_nb` reads it, and fails if a value is invalid.
`%distributed config` takes precedence, and so do the settings of a cluster that `%distributed attach` reconnects to.

`scripts/settings_table.py` generates this page from the docstrings in the code.
"""

BETWEEN = """
## Environment variables

The variables that axon_nb reads. Ranks inherit the notebook's environment as it is when they start, plus what
`torchrun` sets, and `OMP_NUM_THREADS` from the setting `threads`.
"""


def docstrings(path: Path, class_name: str | None = None) -> dict[str, str]:
    """Docstrings below the assignments of a module or of one of its classes, by name, each as one line."""
    body: Sequence[ast.stmt] = ast.parse(path.read_text(encoding="utf-8")).body
    if class_name is not None:
        body = next(node.body for node in body if isinstance(node, ast.ClassDef) and node.name == class_name)
    found = {}
    for node, after in pairwise(body):
        target = node.targets[0] if isinstance(node, ast.Assign) else getattr(node, "target", None)
        text = after.value.value if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant) else None
        if isinstance(target, ast.Name) and isinstance(text, str):
            found[target.id] = " ".join(text.split())
    return found


def _rows() -> list[str]:
    meanings = docstrings(SETTINGS, "Settings")
    rows = []
    for name, setting in Settings.known().items():
        default = setting.kind.show(Settings.default(name))
        cells = (f"`{name}`", f"`{default}`", setting.kind.unit or "number", setting.takes_effect.value, meanings[name])
        rows.append(f"| {' | '.join(cells)} |")
    return rows


def _variable_rows() -> list[str]:
    rows = []
    for name, meaning in docstrings(VARIABLES).items():
        entry = getattr(environment, name)
        one = isinstance(entry, environment.Variable)
        names = ", ".join(f"`{each}`" for each in ([entry.name] if one else entry.names))
        rows.append(f"| {names} | {f'`{entry.default}`' if one and entry.default else ''} | {meaning} |")
    return rows


def render() -> str:
    """Render `docs/settings.md`."""
    names = [f"`{name}`" for name, setting in Settings.known().items() if setting.per_cluster]
    kept = f"{', '.join(names[:-1])} and {names[-1]}"
    table = ["| setting | default | unit | takes effect | meaning |", "|---|---|---|---|---|", *_rows()]
    variables = ["| variable | default | meaning |", "|---|---|---|", *_variable_rows()]
    return "\n".join([HEAD.format(kept=kept), *table, BETWEEN, *variables]) + "\n"


def main(argv: list[str] | None = None) -> int:
    """Write the page; return 1 if `--check` finds it out of date."""
    return write_or_check(TARGET, render, __doc__, argv)


if __name__ == "__main__":
    sys.exit(main())
