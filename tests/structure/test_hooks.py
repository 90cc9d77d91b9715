"""Private names of other packages: each that the code uses is registered, and each that is registered is used."""

from __future__ import annotations

import ast
import re
import sys
import sysconfig
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from axon_nb.engine.self_test.catalog import CHECKS
from axon_nb.records import hooks
from axon_nb.records.hooks import TESTED
from scripts import hooks_table
from tests.structure.conftest import nodes

_PACKAGES = ("IPython", "accelerate", "deepspeed", "ipykernel", "ipyparallel", "ipywidgets", "torch", "tqdm")
_MODULE = re.compile(rf"(?:{'|'.join(_PACKAGES)})(?:\.\w+)+")
_BY_NAME = {"delattr", "getattr", "hasattr", "setattr"}

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


def _is_private(name: str) -> bool:
    """Whether a name is private: not a dunder, and not a protocol such as `_repr_html_`."""
    return name.startswith("_") and not name.endswith("_")


def names_of(path: str) -> set[str]:
    """The private parts of a dotted path."""
    return {part for part in re.split(r"\W+", path) if _is_private(part)}


def own_names(nodes: Sequence[ast.AST]) -> set[str]:
    """The private names that a file defines: functions, classes, variables, slots, attributes of its objects."""
    names: set[str] = set()
    for node in nodes:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and _is_own(node.value):
            names.add(node.attr)
    return set(filter(_is_private, names))


def _is_own(owner: ast.expr) -> bool:
    return isinstance(owner, ast.Name) and owner.id in {"cls", "self"}


def _aliases(nodes: Sequence[ast.AST]) -> dict[str, str]:
    """Dotted names of what a file imports from other packages, by the names that it uses."""
    found: dict[str, str] = {}
    for node in nodes:
        if isinstance(node, ast.Import):
            found.update({each.asname or each.name.partition(".")[0]: each.name for each in node.names})
        elif isinstance(node, ast.ImportFrom):
            found.update({each.asname or each.name: f"{node.module}.{each.name}" for each in node.names})
    for node in nodes:  # c10d = dist.distributed_c10d
        if isinstance(node, ast.Assign | ast.AnnAssign) and isinstance(node.value, ast.Attribute):
            root = ast.unparse(node.value).partition(".")[0]
            for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                if root in found and isinstance(target, ast.Name):
                    found[target.id] = f"{found[root]}.{node.value.attr}"
    return {name: path for name, path in found.items() if path.partition(".")[0] not in {"__future__", "axon_nb"}}


def _first_name(owner: ast.expr) -> str:
    """The name that an expression begins with; empty if it begins with something else."""
    while isinstance(owner, ast.Attribute | ast.Call | ast.Subscript):
        owner = owner.func if isinstance(owner, ast.Call) else owner.value
    return owner.id if isinstance(owner, ast.Name) else re.split(r"\W", ast.unparse(owner), maxsplit=1)[0]


def private_uses(nodes: Sequence[ast.AST]) -> Iterator[tuple[int, str, bool]]:
    """Find private names in use, and names of other packages that are replaced.

    Args:
        nodes: All nodes of a file's syntax tree, breadth first.

    Yields:
        The line, the name, and whether the name certainly belongs to another package.
    """
    aliases = _aliases(nodes)

    def is_foreign(owner: ast.expr) -> bool:
        return _first_name(owner) in aliases

    for node in nodes:
        if isinstance(node, ast.Attribute) and not _is_own(node.value):
            foreign = is_foreign(node.value)
            replaced = foreign and not isinstance(node.ctx, ast.Load) and not _is_standard(node.value, aliases)
            if _is_private(node.attr) or replaced:
                yield node.lineno, node.attr, foreign
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in _BY_NAME:
            name = node.args[1]
            if isinstance(name, ast.Constant) and isinstance(name.value, str) and _is_private(name.value):
                yield node.lineno, name.value, is_foreign(node.args[0])
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and _MODULE.fullmatch(node.value):
            yield from ((node.lineno, name, True) for name in names_of(node.value))
        elif isinstance(node, ast.Import | ast.ImportFrom):
            base = f"{node.module}." if isinstance(node, ast.ImportFrom) else ""
            paths = [f"{base}{each.name}" for each in node.names]
            for path in paths:
                if path.partition(".")[0] not in {"__future__", "axon_nb"}:
                    yield from ((node.lineno, name, True) for name in names_of(path))


def _is_standard(owner: ast.expr, aliases: dict[str, str]) -> bool:
    root = aliases[_first_name(owner)]
    return root.partition(".")[0] in sys.stdlib_module_names


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
