"""What others read about the project: its versions, addresses and forms agree with each other."""

from __future__ import annotations

import os
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

import axon_nb

FORMS = (".github/ISSUE_TEMPLATE/bug.yml", ".github/ISSUE_TEMPLATE/feature.yml")
NAMED = ("CITATION.cff", "SECURITY.md", ".github/ISSUE_TEMPLATE/bug.yml", ".github/ISSUE_TEMPLATE/config.yml")


@pytest.fixture(scope="module")
def base(root: Path) -> str:
    """The address of the repository, as pyproject.toml has it."""
    urls = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]["urls"]
    assert all(url.startswith(urls["Source"]) for url in urls.values())
    return urls["Source"]


def load(path: Path) -> Any:
    """The content of a YAML file."""
    return yaml.safe_load(path.read_text(encoding="utf-8"))


def test_binder_has_the_torch_that_is_tested(root: Path) -> None:
    constraints = (root / "constraints.txt").read_text(encoding="utf-8")
    tested = re.search(r"^torch==(\d+\.\d+)\.", constraints, re.MULTILINE)
    assert tested is not None
    assert f"pytorch-cpu={tested[1]}.*" in load(root / "binder" / "environment.yml")["dependencies"]


def test_binder_runs_post_build(root: Path) -> None:
    assert os.access(root / "binder" / "postBuild", os.X_OK)


def test_badge_opens_a_notebook(root: Path, base: str) -> None:
    readme = (root / "README.md").read_text(encoding="utf-8")
    project = base.removeprefix("https://github.com/")
    (path,) = re.findall(rf"https://mybinder\.org/v2/gh/{project}/HEAD\?urlpath=lab/tree/([\w./]+)", readme)
    assert (root / path).is_file()


def test_repository_has_one_address(root: Path, base: str) -> None:
    owner = base.rpartition("/")[0]
    for name in NAMED:
        found = re.findall(rf"{owner}/[\w.-]+", (root / name).read_text(encoding="utf-8"))
        assert found, name
        assert set(found) == {base}, name


def test_relative_links_lead_somewhere(root: Path) -> None:
    for name in ("CONTRIBUTING.md", "README.md", "SECURITY.md"):
        text = (root / name).read_text(encoding="utf-8")
        targets = re.findall(r"\]\((?!https?:|#)([^)#\s]+)", text) + re.findall(r'(?:src|srcset)="([^"]+)"', text)
        assert [target for target in targets if not (root / target).exists()] == [], name


def test_citation_is_complete(root: Path, base: str) -> None:
    citation = load(root / "CITATION.cff")
    assert citation["cff-version"] == "1.2.0"
    assert citation["version"] == axon_nb.__version__
    assert citation["license"] == "Apache-2.0"
    assert citation["repository-code"] == base
    assert citation["authors"]
    assert {"message", "title", "type"} <= citation.keys()


@pytest.mark.parametrize("name", FORMS)
def test_issue_form_is_well_formed(root: Path, name: str) -> None:
    form = load(root / name)
    assert {"name", "description", "body"} <= form.keys()
    fields = [element for element in form["body"] if element["type"] != "markdown"]
    assert all(element["attributes"]["label"] for element in fields)
    ids = [element["id"] for element in fields]
    assert len(set(ids)) == len(ids)
    assert any(element.get("validations", {}).get("required") for element in fields)
