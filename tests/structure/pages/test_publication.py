"""What others read about the project: its versions, addresses and forms agree with each other."""

from __future__ import annotations

import os
import re
import shutil
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

import axon_nb
from scripts.repository import FILES
from tests.packaging.environments import ADDRESS, publish

FORMS = (".github/ISSUE_TEMPLATE/bug.yml", ".github/ISSUE_TEMPLATE/feature.yml")
PROMISES = re.compile(
    r"""github\.com/([\w-]+/axon.nb|axon-nb/[\w.-]+)|mybinder\.org/v2/gh/([\w-]+/[\w.-]+)"""
    r"""|pip install ["']?(axon_nb)\b(?!-)"""
)
"""Where the project is said to be: its repository, its Binder, an index."""
TEXT = {"", ".cff", ".ipynb", ".js", ".json", ".md", ".py", ".sh", ".toml", ".ts", ".txt", ".yaml", ".yml"}
GENERATED = re.compile(r"docs/(course|examples|reference/generated)/|(.*/)?(__pycache__|node_modules)/")


@pytest.fixture(scope="module")
def base(root: Path) -> str:
    """The address of the repository, as pyproject.toml has it; empty while it has none."""
    return tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["axon_nb"]["repository"]


@pytest.fixture(scope="module")
def published(root: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the files that can name the repository, after it got an address."""
    folder = tmp_path_factory.mktemp("published")
    for name in (*FILES, "scripts/generated_page.py", "scripts/repository.py"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(root / name, folder / name)
    publish(folder)
    return folder


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


def test_badge_opens_a_notebook(root: Path, published: Path) -> None:
    readme = (published / "README.md").read_text(encoding="utf-8")
    (path,) = re.findall(r"https://mybinder\.org/v2/gh/owner/name/HEAD\?urlpath=lab/tree/([\w./]+)", readme)
    assert (root / path).is_file()


def test_address_is_written_where_it_is_needed(published: Path) -> None:
    texts = {name: (published / name).read_text(encoding="utf-8") for name in FILES}
    assert "%pip install git+https://github.com/owner/name\n" in texts["docs/start/install.md"]
    assert f"({ADDRESS}/security/advisories/new)" in texts["SECURITY.md"]
    assert f"({ADDRESS}/issues)" in texts["CONTRIBUTING.md"]
    assert f"<{ADDRESS}/blob/HEAD/CHANGELOG.md>" in texts["docs/index.md"]
    assert load(published / "CITATION.cff")["repository-code"] == ADDRESS
    assert load(published / ".github" / "conda" / "recipe.yaml")["about"]["homepage"] == ADDRESS
    contacts = load(published / ".github" / "ISSUE_TEMPLATE" / "config.yml")["contact_links"]
    assert all(contact["url"].startswith(ADDRESS) for contact in contacts)
    project = tomllib.loads(texts["pyproject.toml"])
    assert project["project"]["urls"]["Source"] == ADDRESS
    hooks = project["tool"]["hatch"]["metadata"]["hooks"]["fancy-pypi-readme"]
    assert all(f"{ADDRESS}/" in substitution["replacement"] for substitution in hooks["substitutions"])


def test_without_the_address_the_files_are_as_before(root: Path, published: Path, base: str, tmp_path: Path) -> None:
    folder = shutil.copytree(published, tmp_path / "copy")
    publish(folder, base)
    assert [name for name in FILES if (folder / name).read_bytes() != (root / name).read_bytes()] == []


@pytest.mark.parametrize("wrong", ["https://github.com/owner/name.git", "https://example.org/name"])
def test_other_addresses_are_refused(published: Path, tmp_path: Path, wrong: str) -> None:
    folder = shutil.copytree(published, tmp_path / "copy")
    with pytest.raises(AssertionError, match=f"must be https://github.com/OWNER/NAME, or empty; got '{wrong}'"):
        publish(folder, wrong)


def test_no_file_names_an_address_that_does_not_exist(root: Path, base: str) -> None:
    places = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))
    names = places["tool"]["hatch"]["build"]["targets"]["sdist"]["only-include"]
    paths = [path for name in names for path in (root / name, *(root / name).rglob("*")) if path.is_file()]
    project = base.removeprefix("https://github.com/")
    found = {
        (path.relative_to(root).as_posix(), next(filter(None, match.groups())))
        for path in paths
        if path.suffix in TEXT and not GENERATED.match(path.relative_to(root).as_posix())
        for match in PROMISES.finditer(path.read_text(encoding="utf-8"))
    }
    assert sorted((name, address) for name, address in found if address != project) == []


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
    assert citation.get("repository-code", "") == base
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
