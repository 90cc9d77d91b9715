"""What the archives hold, and what is said of the package where it is published."""

from __future__ import annotations

import ast
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from importlib import import_module
from importlib.metadata import entry_points, packages_distributions, version
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import axon_nb
from scripts.repository import FILES
from tests.packaging.environments import ADDRESS, publish
from tests.structure.conftest import nodes

OPTIONAL_IMPORTS = {"cupy": "cupy-cuda13x", "pynvml": "nvidia-ml-py"}
"""Imported names of extras that need not be installed here, and the distributions that bring them."""
TRACKERS = ("mlflow", "trackio", "wandb")
"""What `config log_to` writes to is installed by who uses it."""

FORMS = (".github/ISSUE_TEMPLATE/bug.yml", ".github/ISSUE_TEMPLATE/feature.yml")
PROMISES = re.compile(
    r"""github\.com/([\w-]+/axon.nb|axon-nb/[\w.-]+)|mybinder\.org/v2/gh/([\w-]+/[\w.-]+)"""
    r"""|pip install ["']?(axon_nb)\b(?!-)"""
)
"""Where the project is said to be: its repository, its Binder, an index."""
TEXT = {"", ".cff", ".ipynb", ".js", ".json", ".md", ".py", ".sh", ".toml", ".ts", ".txt", ".yaml", ".yml"}
GENERATED = re.compile(r"docs/(course|examples|reference/generated)/|(.*/)?(__pycache__|node_modules)/")


@pytest.fixture(scope="module")
def project(root: Path) -> dict[str, Any]:
    """The `[project]` table."""
    return tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]


@pytest.fixture(scope="module")
def archives(root: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A source archive of the project, and the wheel built from it."""
    out = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(out), str(root)]
    subprocess.run(command, check=True, capture_output=True, text=True)
    (source,), (wheel,) = out.glob("*.tar.gz"), out.glob("*.whl")
    return source, wheel


def test_news_becomes_one_section_of_the_changelog(root: Path, tmp_path: Path) -> None:
    shutil.copytree(root / "news", tmp_path / "news")
    for name in ("CHANGELOG.md", "pyproject.toml"):
        shutil.copy(root / name, tmp_path)
    news = [path.read_text(encoding="utf-8").split() for path in (root / "news").glob("*.md")]
    command = [sys.executable, "-m", "towncrier", "build", "--yes", "--version", axon_nb.__version__]
    subprocess.run(command, cwd=tmp_path, check=True, capture_output=True)
    text = (tmp_path / "CHANGELOG.md").read_text(encoding="utf-8")
    assert text.count(f"\n## {axon_nb.__version__} (") == 1
    words = " ".join(text.split())
    assert all(" ".join(fragment) in words for fragment in news)
    assert not list((tmp_path / "news").glob("*.md"))


def test_wheel_holds_every_file_of_the_package(
    archives: tuple[Path, Path], root: Path, package_files: list[Path]
) -> None:
    with zipfile.ZipFile(archives[1]) as wheel:
        inside = {name: wheel.getinfo(name) for name in wheel.namelist()}
    expected = {path.relative_to(root).as_posix() for path in package_files}
    assert "axon_nb/magics/__init__.py" in expected
    assert expected <= inside.keys()
    assert all(inside[name].file_size == (root / name).stat().st_size for name in expected)
    assert "axon_nb/py.typed" in inside
    assert "axon_nb/records/hooks.toml" in inside
    named = f"axon_nb-{axon_nb.__version__}"
    assert {name.partition("/")[0] for name in inside} == {"axon_nb", f"{named}.data", f"{named}.dist-info"}


def test_wheel_installs_the_panel_where_jupyter_looks(archives: tuple[Path, Path], root: Path) -> None:
    folder = root / "axon_nb" / "lab"
    prefix = f"axon_nb-{axon_nb.__version__}.data/data"
    with zipfile.ZipFile(archives[1]) as wheel:
        found = {
            name.removeprefix(f"{prefix}/"): wheel.read(name) for name in wheel.namelist() if name.startswith(prefix)
        }
    expected = {
        f"share/jupyter/labextensions/@axon-nb/panel/{path.relative_to(folder / 'labextension').as_posix()}": path
        for path in (folder / "labextension").rglob("*")
        if path.is_file()
    }
    expected["etc/jupyter/jupyter_server_config.d/axon_nb.json"] = folder / "jupyter_server_config.json"
    assert found == {name: path.read_bytes() for name, path in expected.items()}
    package = json.loads((folder / "labextension" / "package.json").read_text(encoding="utf-8"))
    assert package["version"] == axon_nb.__version__
    assert (folder / "labextension" / package["jupyterlab"]["_build"]["load"]).is_file()


def test_wheel_holds_the_assets(archives: tuple[Path, Path], root: Path) -> None:
    assets = {
        path.relative_to(root).as_posix()
        for path in (root / "axon_nb").rglob("static/**/*")
        if path.suffix in {".css", ".js"}
    }
    assert "axon_nb/widgets/static/shared/tokens.css" in assets
    with zipfile.ZipFile(archives[1]) as wheel:
        assert assets <= set(wheel.namelist())


def test_source_archive_holds_no_links(archives: tuple[Path, Path]) -> None:
    with tarfile.open(archives[0]) as source:
        assert not [member.name for member in source if member.issym() or member.islnk()]


def test_installed_version_is_the_source_version() -> None:
    assert version("axon_nb") == axon_nb.__version__


@pytest.mark.parametrize("group", ["ipyparallel.controller_launchers", "ipyparallel.engine_launchers"])
def test_launcher_is_registered(group: str) -> None:
    (launcher,) = entry_points(group=group, name="axon")
    assert isinstance(launcher.load(), type)


def test_pins_fit_the_declared_ranges(project: dict[str, Any], root: Path) -> None:
    lines = (root / "constraints.txt").read_text(encoding="utf-8").splitlines()
    requirements = [Requirement(line) for line in lines if line and not line.startswith("#")]
    pins = {canonicalize_name(pin.name): next(iter(pin.specifier)).version for pin in requirements}
    assert len(pins) == len(requirements)
    extras = project["optional-dependencies"]
    pinned_extras = [extras[name] for name in ("demo", "dev", "frameworks", "lab", "mcp")]
    for text in chain(project["dependencies"], *pinned_extras):
        wanted = Requirement(text)
        if wanted.name == project["name"]:
            continue
        pinned = pins.get(canonicalize_name(wanted.name))
        assert pinned is not None, f"{wanted.name} is not pinned in constraints.txt"
        assert wanted.specifier.contains(pinned), f"{text}, but constraints.txt has {pinned}"


@pytest.mark.parametrize(
    ("target", "there", "installed"),
    [
        ("demo", "", "demo"),
        ("lab", "", "demo,lab"),
        ("check", "", "dev"),
        ("demo", ".installed-lab", None),
        ("lab", ".installed-demo", "demo,lab"),
        ("demo", ".installed", None),
        ("lab", ".installed", None),
        ("check", ".installed-demo", "dev"),
    ],
)
def test_make_installs_what_the_target_needs(
    root: Path, tmp_path: Path, target: str, there: str, installed: str | None
) -> None:
    if there:
        (tmp_path / there).touch()
    command = ["make", "--dry-run", f"VENV={tmp_path}", target]
    shown = subprocess.run(command, cwd=root, check=True, capture_output=True, text=True).stdout
    assert re.findall(r"-e '\.\[(.*)]'", shown) == ([] if installed is None else [installed])


def test_imports_are_declared(project: dict[str, Any], package_files: list[Path]) -> None:
    extras = project["optional-dependencies"]
    texts = (
        *project["dependencies"],
        *(text for extra in ("gpu", "frameworks", "k8s", "lab", "mcp", "ray", "test") for text in extras[extra]),
        *TRACKERS,
    )
    declared = {canonicalize_name(Requirement(text).name) for text in texts}
    providers = {name: {canonicalize_name(dist) for dist in dists} for name, dists in packages_distributions().items()}
    missing: dict[str, list[str]] = {}
    for path in package_files:
        for name in top_level_imports(path) - {"axon_nb"} - sys.stdlib_module_names:
            known = providers.get(name, {OPTIONAL_IMPORTS.get(name, name)})
            if not known & declared:
                missing.setdefault(name, []).append(path.name)
    assert not missing, f"imported, but not in pyproject.toml: {missing}"


def top_level_imports(path: Path) -> set[str]:
    """The first parts of all names that a file imports."""
    names = set()
    for node in nodes(path):
        if isinstance(node, ast.Import):
            names.update(alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module.partition(".")[0])
    return names


def test_command_is_declared(project: dict[str, Any]) -> None:
    module, _, function = project["scripts"]["axon-nb"].partition(":")
    assert callable(getattr(import_module(module), function))


def test_conda_recipe_needs_what_the_wheel_needs(root: Path, project: dict[str, Any]) -> None:
    recipe = yaml.safe_load((root / ".github" / "conda" / "recipe.yaml").read_text(encoding="utf-8"))
    assert recipe["context"]["version"] == axon_nb.__version__
    assert f">={recipe['context']['python_min']}" == project["requires-python"]
    names = {"torch": "pytorch"}
    needed = {
        f"{names.get(requirement.name, requirement.name)} {requirement.specifier}"
        for requirement in map(Requirement, project["dependencies"])
    }
    assert {line for line in recipe["requirements"]["run"] if line.split()[0] not in ("python", "__linux")} == needed
    scripts = {f"{name} = {target}" for name, target in project["scripts"].items()}
    assert set(recipe["build"]["python"]["entry_points"]) == scripts


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
