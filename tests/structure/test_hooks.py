"""The register of private hooks: it is complete, and its page is up to date."""

from __future__ import annotations

import ast
import re
import sysconfig
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from axon_nb.engine.self_test.catalog import CHECKS
from axon_nb.records import hooks
from axon_nb.records.hooks import TESTED
from scripts import hooks_table
from tests.structure.conftest import nodes
from tests.structure.private_names import names_of, own_names, private_uses

PUBLIC = {
    "_exit": "os._exit is documented",
    "_make": "namedtuple's documented methods",
    "_replace": "namedtuple's documented methods",
}
"""Names that look private and are not, each with the reason."""

NOT_IN_TEXT = {
    "_WORLD_GROUP": "the code matches names by their ends",
    "_register_process_group": "torch's own code calls it, for our groups",
}
"""Names that the files of their hook do not show, each with the reason."""

UPSTREAM = re.compile(
    r"https://github\.com/[\w.-]+/[\w.-]+/(?:(?:issues|pull)/\d+|blob/v?(?P<tag>[\d.]+)/(?P<path>[\w./-]+\.(?:py|c|cpp|yaml)))"
)
"""An issue, a pull request, or a file at a tag."""

HOOKS = [hooks.hook(group) for group in hooks.groups()]


def used_names(hook: hooks.Hook) -> set[str]:
    """The names by which our files use a hook: the last parts of what it needs, and the private ones before."""
    last = {re.sub(r"\(.*", "", need).rstrip(":").rpartition(".")[2].rpartition(":")[2] for need in hook.needs}
    return last | set(hook.uses)


def registered(root: Path) -> dict[str, set[str]]:
    """The names that the register has for each file."""
    found: dict[str, set[str]] = {}
    for hook in HOOKS:
        names = used_names(hook)
        for place in (*hook.needs, *hook.objects.values(), hook.only_if):
            names |= names_of(place)
        for file in hook.files:
            found.setdefault((root / file).relative_to(root).as_posix(), set()).update(names)
    return found


def test_groups_are_unique_and_complete() -> None:
    content = tomllib.loads(hooks.REGISTER.read_text(encoding="utf-8"))
    assert [table["group"] for table in content["hook"]] == hooks.groups()
    assert {table["group"]: list(table.get("needs", ())) for table in content["hook"]} == {
        hook.group: list(hook.needs) for hook in HOOKS
    }


@pytest.mark.parametrize("hook", HOOKS, ids=lambda hook: hook.group)
def test_hooks_have_all_fields(hook: hooks.Hook) -> None:
    assert hook.needs
    assert hook.replaces
    assert bool(hook.lost) != bool(hook.capability), "either says what is lost"
    assert hook.capability in {"", *(check.name for check in CHECKS)}
    assert UPSTREAM.fullmatch(hook.upstream)
    assert hooks.tested_versions(hook.package)
    assert hook.fix
    assert list(hook.files) == sorted(set(hook.files))
    assert list(hook.uses) == sorted(set(hook.uses))


@pytest.mark.parametrize("hook", [hook for hook in HOOKS if "/blob/" in hook.upstream], ids=lambda hook: hook.group)
def test_upstream_source_is_a_file_of_a_tested_version(hook: hooks.Hook) -> None:
    match = UPSTREAM.fullmatch(hook.upstream)
    assert match is not None
    package = "ipykernel" if "/ipykernel/" in hook.upstream else hook.package
    assert any(match["tag"].startswith(f"{version}.") for version in hooks.tested_versions(package))
    if match["path"].endswith(".py"):
        assert any((folder / part).is_file() for folder in installed_roots() for part in endings(match["path"]))


def installed_roots() -> list[Path]:
    """Where packages and the standard library are installed."""
    return [Path(sysconfig.get_path(name)) for name in ("purelib", "platlib", "stdlib")]


def endings(path: str) -> list[str]:
    """The path, and what is left of it without the folders of the repository that are not installed."""
    parts = path.split("/")
    return ["/".join(parts[start:]) for start in range(min(3, len(parts)))]


@pytest.mark.parametrize("hook", HOOKS, ids=lambda hook: hook.group)
def test_files_of_a_hook_use_it(hook: hooks.Hook, root: Path) -> None:
    texts = [(root / file).read_text(encoding="utf-8") for file in hook.files]
    places = (*hook.needs, *hook.objects.values(), hook.only_if)
    names = used_names(hook).union(*map(names_of, places), *(re.findall(r"\w+", need)[-2:] for need in hook.needs))
    for file, text in zip(hook.files, texts, strict=True):
        assert any(re.search(rf"\b{name}\b", text) for name in names), f"{file} uses nothing of it"
    private = {name for name in used_names(hook) if name.startswith("_") and not name.endswith("__")}
    unused = {name for name in private - NOT_IN_TEXT.keys() if not any(name in text for text in texts)}
    assert not unused, f"used in none of its files: {sorted(unused)}"


def test_used_private_names_are_registered(package_files: list[Path], root: Path) -> None:
    known = registered(root)
    ours = set().union(*(own_names(nodes(path)) for path in package_files)) - set().union(*known.values())
    problems = []
    for path in package_files:
        file = path.relative_to(root).as_posix().replace("axon_nb/magics/", "magics/")
        own = own_names(nodes(path))
        for line, name, foreign in private_uses(nodes(path)):
            is_ours = not foreign and name in own | ours
            if not is_ours and name not in known.get(file, ()) and name not in PUBLIC:
                problems.append(f"{file}:{line}: {name}")
    assert not problems, "not in axon_nb/records/hooks.toml:\n" + "\n".join(problems)


def test_tested_versions_agree(root: Path) -> None:
    """The register has one floor with the self-test's ranges, and knows the versions that are pinned."""
    for package, (lowest, _) in TESTED.items():
        assert hooks.tested_versions(package)[0] == lowest
    lines = (root / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pins = {pin.name: str(pin.specifier) for line in lines if line[:1].isalpha() for pin in [Requirement(line)]}
    for package in {hook.package for hook in HOOKS} - {"Python"}:
        pinned = ".".join(pins[package].removeprefix("==").split(".")[:2])
        assert pinned in hooks.tested_versions(package)


@pytest.mark.parametrize(
    ("code", "found"),
    [
        ("import torch\ntorch._C._x()", {"_C", "_x"}),
        ("import torch.distributed as dist\nc10d = dist.distributed_c10d\nc10d._world", {"_world"}),
        ("from torch._inner import thing", {"_inner"}),
        ("import torch\ntorch.autograd.backward = None", {"backward"}),
        ("getattr(group, '_get_backend')", {"_get_backend"}),
        ("loaded('torch.fsdp._flat', 'x')", {"_flat"}),
        ("self._own = 1\nvalue.__dict__, value._repr_html_()", set()),
    ],
)
def test_finder_detects_private_names(code: str, found: set[str]) -> None:
    assert {name for _, name, _ in private_uses(list(ast.walk(ast.parse(code))))} == found


def test_the_page_is_up_to_date() -> None:
    assert hooks_table.main(["--check"]) == 0
