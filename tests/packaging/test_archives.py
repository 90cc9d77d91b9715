"""The source archive and the wheel: complete, equal to each other, and fit for a package index."""

from __future__ import annotations

import email
import email.message
import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from html.parser import HTMLParser
from pathlib import Path

import pytest
from readme_renderer.markdown import render

from tests.packaging.conftest import Archives
from tests.packaging.environments import ADDRESS, ROOT, publish, run

pytestmark = pytest.mark.slow

TARGETS = set(re.findall(r"^([a-z-]+):.*  ## ", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
MADE = (".git", ".venv", "build", "dist", "out")
"""Folders that targets or `make install` make."""
URLS = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"].get("urls", {})


class Targets(HTMLParser):
    """Collects where the links and the pictures of a page point to."""

    def __init__(self) -> None:
        super().__init__()
        self.links: list[str] = []
        self.pictures: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Note the targets of one tag."""
        values = dict(attrs)
        self.links += [value for name in ("href",) if (value := values.get(name))]
        self.pictures += [value for name in ("src", "srcset") if (value := values.get(name))]


def contents(wheel: Path) -> dict[str, bytes]:
    """Every file of a wheel by its name."""
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def metadata(wheel: Path) -> email.message.Message:
    """The METADATA of a wheel."""
    (text,) = (data for name, data in contents(wheel).items() if name.endswith(".dist-info/METADATA"))
    return email.message_from_bytes(text)


@pytest.fixture(scope="module")
def published(archives: Archives, tmp_path_factory: pytest.TempPathFactory) -> email.message.Message:
    """The METADATA of a wheel that is built after the repository got an address."""
    tree = tmp_path_factory.mktemp("published") / "tree"
    shutil.copytree(archives.unpacked, tree, ignore=shutil.ignore_patterns("PKG-INFO"))  # else that is taken
    publish(tree)
    command = [sys.executable, "-m", "build", "--no-isolation", "--wheel", "--outdir", str(tree / "dist"), str(tree)]
    run(command, cwd=tree, env=dict(os.environ))
    (wheel,) = (tree / "dist").glob("*.whl")
    return metadata(wheel)


@pytest.fixture(scope="module")
def description(published: email.message.Message) -> str:
    """The long description that a package index shows, as Markdown."""
    payload = published.get_payload(decode=True)
    assert isinstance(payload, bytes)
    return payload.decode()


def test_archives_pass_twine_check(archives: Archives) -> None:
    command = [sys.executable, "-m", "twine", "check", "--strict", str(archives.source), str(archives.wheel)]
    found = run(command, cwd=archives.unpacked, env=dict(os.environ))
    assert found.count("PASSED") == 2, found


def test_source_archive_builds_the_same_wheel(archives: Archives) -> None:
    assert archives.wheel_of_source.name == archives.wheel.name
    ours, theirs = contents(archives.wheel), contents(archives.wheel_of_source)
    assert ours.keys() == theirs.keys()
    assert [name for name in ours if ours[name] != theirs[name]] == []


def test_wheel_holds_the_package_and_no_more(archives: Archives) -> None:
    inside = contents(archives.wheel)
    data, version = sorted({name.partition("/")[0] for name in inside} - {"axon_nb"})
    assert (data.rpartition(".")[2], version.rpartition(".")[2]) == ("data", "dist-info")
    assert not [name for name in inside if {"__pycache__", "tests"} & set(name.split("/"))]
    installed = {"/".join(name.split("/")[2:4]) for name in inside if name.startswith(data)}
    assert installed == {"etc/jupyter", "share/jupyter"}
    # `axon_nb/magics` is a link in the repository, and a folder of real files here.
    expected = {f"axon_nb/{path.relative_to(ROOT).as_posix()}" for path in (ROOT / "magics").rglob("*.py")}
    static = filter(Path.is_file, (ROOT / "axon_nb").rglob("static/**/*"))
    expected |= {path.relative_to(ROOT).as_posix() for path in static}
    expected |= {"axon_nb/py.typed", f"{version}/licenses/LICENSE"}
    assert {
        "axon_nb/magics/__init__.py",
        "axon_nb/widgets/static/shared/tokens.css",
        "axon_nb/widgets/static/watch/view.js",
    } < expected
    assert expected <= inside.keys()


def test_source_archive_holds_every_file_of_the_repository(archives: Archives) -> None:
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=False)
    if listed.returncode:
        pytest.skip("not in a git repository")
    names = {name for name in listed.stdout.split("\0") if name and not (ROOT / name).is_symlink()}
    assert sorted(name for name in names if not (archives.unpacked / name).is_file()) == []


@pytest.mark.parametrize("target", sorted(TARGETS - {"clean"}))  # `clean` names what others make
def test_source_archive_holds_what_the_makefile_names(archives: Archives, target: str) -> None:
    found = run(["make", "--dry-run", target], cwd=archives.unpacked, env=dict(os.environ))
    folders = "|".join(re.escape(path.name) for path in ROOT.iterdir() if path.is_dir() and path.name not in MADE)
    paths = set(re.findall(rf"(?<![\w./-])(?:{folders})(?:/[\w.-]+)*", found))
    modules = set(re.findall(rf"-m ((?:{folders})(?:\.\w+)+)", found))
    paths |= {f"{path}/__main__.py" if (ROOT / path).is_dir() else f"{path}.py" for path in map(_path, modules)}
    assert sorted(path for path in paths if not (archives.unpacked / path).exists()) == []


def _path(module: str) -> str:
    return module.replace(".", "/")


def test_source_archive_passes_the_checks(archives: Archives) -> None:
    env = {**os.environ, "VENV": sys.prefix, "PYTHONPATH": str(archives.unpacked)}
    run(["scripts/check"], cwd=archives.unpacked, env=env)


def test_metadata_names_the_project(archives: Archives, published: email.message.Message) -> None:
    ours = metadata(archives.wheel)
    assert urls(ours) == URLS
    assert {"Homepage", "Issues", "Source"} <= urls(published).keys()
    assert all(url.startswith(ADDRESS) for url in urls(published).values())
    assert ours["Author"] == "axon_nb contributors"
    assert ours["License-Expression"] == "Apache-2.0"
    assert ours["Description-Content-Type"] == "text/markdown"


def urls(message: email.message.Message) -> dict[str, str]:
    """The project's addresses by name."""
    return dict(url.split(", ", 1) for url in message.get_all("Project-URL", []))


def test_description_has_no_relative_target(description: str) -> None:
    html = render(description)
    assert html is not None
    page = Targets()
    page.feed(html)
    assert page.links
    assert page.pictures, "the index shows no picture"
    assert [link for link in page.links if not link.startswith(("https://", "#", "mailto:"))] == []
    assert [picture for picture in page.pictures if not picture.startswith("https://")] == []


def test_description_shows_every_picture_of_the_readme(description: str) -> None:
    html = render(description)
    assert html is not None
    names = set(re.findall(r'\bsrc="docs/images/([\w.-]+)"', (ROOT / "README.md").read_text(encoding="utf-8")))
    assert names
    page = Targets()
    page.feed(html)
    shown = {picture.rpartition("/")[2] for picture in page.pictures}
    assert names <= shown


def test_description_points_to_files_that_exist(description: str, archives: Archives) -> None:
    paths = set(re.findall(rf"{re.escape(ADDRESS)}/(?:blob|raw)/HEAD/([^)#\"\s]+)", description))
    assert any(path.startswith("docs/images/") for path in paths)
    assert sorted(path for path in paths if not (ROOT / path).exists()) == []
    assert sorted(path for path in paths if not (archives.unpacked / path).exists()) == []
