"""Write the address of the repository into pages and metadata, from `repository` in `[tool.axon_nb]` of pyproject.toml.

Each place has two lines, `repository: NAME` and `end of repository`, as comments; what stands between them is written.
While there is no address, nothing links to one. `--check` writes nothing and fails if a file is out of date.
"""

from __future__ import annotations

import re
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path

from scripts.generated_page import ROOT, write_or_check

FILES = (
    ".github/ISSUE_TEMPLATE/config.yml",
    ".github/conda/recipe.yaml",
    "CITATION.cff",
    "CONTRIBUTING.md",
    "README.md",
    "SECURITY.md",
    "docs/index.md",
    "docs/start/install.md",
    "pyproject.toml",
)
"""The files that have such places."""

_MARKED = re.compile(
    r"(?P<first>^ *(?:<!--|#) repository: (?P<name>\w+)(?: -->)?\n).*?(?=^ *(?:<!--|#) end of repository\b)",
    re.MULTILINE | re.DOTALL,
)
_ADDRESS = re.compile(r"https://github\.com/[\w-]+/[\w.-]+(?<!\.git)")

_LINKS = {
    "badge": """\
[![Run the quickstart on Binder](https://mybinder.org/badge_logo.svg)](https://mybinder.org/v2/gh/{project}/HEAD?\
urlpath=lab/tree/examples/01_quickstart.ipynb)
""",
    "citation": 'repository-code: "{url}"\n',
    "contact": """\
contact_links:
  - name: Report a vulnerability
    url: {url}/security/advisories/new
    about: Report security problems privately. SECURITY.md has the threat model.
  - name: Read the documentation
    url: {url}/tree/HEAD/docs
    about: The commands, the views, the frameworks, the design.
""",
    "description": """\
[[tool.hatch.metadata.hooks.fancy-pypi-readme.substitutions]]
pattern = '\\]\\((?!https?:|mailto:|#)([^)\\s]+)\\)'
replacement = ']({url}/blob/HEAD/\\1)'

[[tool.hatch.metadata.hooks.fancy-pypi-readme.substitutions]]
pattern = '\\b(src|srcset)="(?!https?:)([^"]+)"'
replacement = '\\1="{url}/raw/HEAD/\\2"'
""",
    "homepage": "  homepage: {url}\n",
    "hosted": """\
A notebook on another machine, such as Colab or Kaggle, installs axon_nb in a cell:

```text
%pip install git+{url}
```
""",
    "menu": """\
```{{toctree}}
:hidden:
:caption: Project

Contributing <{url}/blob/HEAD/CONTRIBUTING.md>
Changelog <{url}/blob/HEAD/CHANGELOG.md>
Issues <{url}/issues>
```
""",
    "report": "[Open an issue]({url}/issues).\n",
    "urls": """\
[project.urls]
Homepage = "{url}"
Documentation = "{url}/tree/HEAD/docs"
Source = "{url}"
Issues = "{url}/issues"
Changelog = "{url}/blob/HEAD/CHANGELOG.md"
""",
    "vulnerability": """\
Report it privately: [open a security advisory]({url}/security/advisories/new). Do not open a public issue.
""",
}
"""What stands in each place once there is an address."""
_WITHOUT = {
    "hosted": """\
For a notebook on another machine, such as Colab or Kaggle, run `pip wheel --no-deps -w dist .` in the checkout and
upload the wheel from `dist/`. Then install it in a cell, from its folder:

```text
%pip install axon_nb-*.whl
```
""",
    "report": "Write to the maintainers of the repository that you cloned, or to whoever gave you your copy.\n",
    "vulnerability": """\
Report it privately, to the maintainers of the repository that you cloned or to whoever gave you your copy, and not
where everybody can read it.
""",
}
"""What stands there while there is none; nothing in the other places."""


def address() -> str:
    """Return the address of the repository, without a slash at the end; empty if there is none.

    Raises:
        SystemExit: it is not the address of a repository on GitHub.
    """
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["axon_nb"]
    url = str(settings.get("repository", ""))
    if url and not _ADDRESS.fullmatch(url):
        raise SystemExit(f"pyproject.toml: repository must be https://github.com/OWNER/NAME, or empty; got {url!r}.")
    return url


def written(text: str, url: str) -> str:
    """Return a file's text with its places written for this address."""
    project = "/".join(url.split("/")[-2:])

    def place(match: re.Match[str]) -> str:
        text = _LINKS[match["name"]].format(url=url, project=project) if url else _WITHOUT.get(match["name"], "")
        return match["first"] + text

    return _MARKED.sub(place, text)


def main(argv: Sequence[str] | None = None) -> int:
    """Write all places; return 1 if `--check` finds one out of date."""
    url = address()

    def write(page: Path) -> int:
        return write_or_check(page, lambda: written(page.read_text(encoding="utf-8"), url), __doc__, argv)

    return max([write(ROOT / name) for name in FILES])


if __name__ == "__main__":
    sys.exit(main())
