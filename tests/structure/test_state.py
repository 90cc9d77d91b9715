"""Run-time state has an owner, and tensors say their device: no module of the package keeps state at its top level.

State is what functions change: a list, dict or set that one of them mutates, a name that one declares `global`, a lock,
counter, queue or weak collection, an instance of one of our classes that are not frozen.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from scripts.devices import files, places
from tests.structure.conftest import syntax

ROOT = Path(__file__).parents[2]
PACKAGES = ("axon_nb", "magics")

ALLOWED = {
    "axon_nb.compat.hints:_shown": "slot: what this process has said in which cell",
    "axon_nb.compat.sharded_tensors:_casts": "slot: how many casts this process has looked at",
    "axon_nb.compat.sharded_tensors:shard_draw": "slot: the last draw of this process into a shard",
    "axon_nb.engine.kernel.hooks:_names": "cache: the modules that there are when ranks are forked",
    "axon_nb.cluster.rpc:_serializers_lock": "lock: ipyparallel's table, which the process has once",
    "axon_nb.cluster.session.current:_session": "slot: the session of this notebook",
    "axon_nb.comm.calls:_open": "slot: the blocks of this process that count calls",
    "axon_nb.comm.collectives.direct:_fast_paths": "cache: the operations of each type of group",
    "axon_nb.comm.spans:device_clock": "slot: the clock of this process's GPU",
    "axon_nb.comm.group:_known": "cache: what does not change of a torch group",
    "axon_nb.widgets.cell.views:_live": "slot: the views of this notebook's last cells",
    "axon_nb.comm.mock_world:_active": "slot: the mock world that torch's functions see",
    "axon_nb.comm.shared_memory.segment.futex:_barrier": "cache: a lock of each thread",
    "axon_nb.comm.shared_memory.segment.progress:_open_groups": "slot: what this process closes when it exits",
    "axon_nb.comm.calls:_lock": "lock: blocks of one process that begin and end at once",
    "axon_nb.comm.calls:_watched": "slot: the groups of this process whose calls are counted now",
    "axon_nb.comm.placements:_meshes": "cache: meshes over the groups of this process",
    "axon_nb.compat.transformers:_order": "slot: the order in which models of this process were called",
    "axon_nb.compat.transformers:_watched": "slot: the calls of this process's split models, weakly",
    "axon_nb.cluster.cells.source:_noted": "slot: the deprecated names that cells of this notebook have reported",
    "axon_nb.comm.placements:_declared": "slot: the placements that were declared of this process's tensors, weakly",
    "axon_nb.compat.horovod.collectives:_states": "slot: Horovod's state of a default group, which torch keeps",
    "axon_nb.inside:_taps": "slot: the hooks of contexts that are entered now, weakly",
    "axon_nb.engine.frames:_pause_lock": "lock: one thread at a time pauses the process's garbage collector",
    "axon_nb.engine.groups.state:_current": "slot: the state of the groups that torch creates",
    "axon_nb.engine.live_objects:_tracked": "slot: the objects of classes of torch that register them, once a process",
    "axon_nb.engine.session:_session": "slot: the session of this rank",
    "axon_nb.plan.footprint.memory:_cache": "cache: the last plans",
    "axon_nb.plan.process:_ran_here": "slot: whether forks of this process died, so that it does their work",
    "axon_nb.records.spans:ring": "slot: the spans of this process, which under torchrun has no session",
    "axon_nb.records.telemetry:_source": "slot: where this process looks up the running cell",
    "axon_nb.records.training.job:metrics": "slot: what `axon_nb.log` has reported in this process",
    "axon_nb.records.training.job:_loops": "slot: the loops of this process",
}
"""What may stay: caches of pure functions; and slots that hold a session, or what a process has without one."""

_DISPLAYS = (ast.List, ast.Dict, ast.Set, ast.ListComp, ast.DictComp, ast.SetComp)
_COLLECTIONS = {
    "Counter", "OrderedDict", "bytearray", "defaultdict", "deque", "dict", "list", "set",
}  # fmt: skip
_ALWAYS_STATE = {
    "BoundedSemaphore", "Condition", "Event", "Lock", "Queue", "RLock", "Semaphore", "SimpleQueue",
    "WeakKeyDictionary", "WeakSet", "WeakTensorKeyDictionary", "WeakValueDictionary", "count", "local",
}  # fmt: skip
_MUTATORS = {
    "add", "append", "appendleft", "clear", "difference_update", "discard", "extend", "insert", "move_to_end", "pop",
    "popitem", "popleft", "remove", "reverse", "setdefault", "sort", "update",
}  # fmt: skip


def _modules() -> dict[str, ast.Module]:
    modules = {}
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            name = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
            modules[name] = syntax(path)
    return modules


def _called(node: ast.expr) -> str:
    """Return the last name of the function that an expression calls; empty for other expressions."""
    function = node.func if isinstance(node, ast.Call) else None
    function = function.value if isinstance(function, ast.Subscript) else function  # set[int]()
    if isinstance(function, ast.Attribute):
        return function.attr
    return function.id if isinstance(function, ast.Name) else ""


def _statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Yield the statements that run on import, also those in a block."""
    for statement in body:
        yield statement
        for block in ("body", "orelse", "finalbody"):
            if not isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                yield from _statements(getattr(statement, block, []))


def _bindings(module: ast.Module) -> dict[str, ast.expr]:
    """Return the values that the module's own statements give to names."""
    bindings = {}
    for statement in _statements(module.body):
        if isinstance(statement, ast.Assign):
            targets: list[ast.expr] = statement.targets
        elif isinstance(statement, ast.AnnAssign):
            targets = [statement.target]
        else:
            continue
        for target in targets:
            if isinstance(target, ast.Name) and statement.value is not None:
                bindings[target.id] = statement.value
    return bindings


def _is_frozen(node: ast.ClassDef) -> bool:
    """Whether instances cannot change: a frozen record, an enumeration, a named tuple, or nothing but methods."""
    calls = [item for item in node.decorator_list if isinstance(item, ast.Call)]
    options = [keyword for item in (node, *calls) for keyword in item.keywords]
    if any(option.arg == "frozen" for option in options):
        return True
    bases = {base.attr if isinstance(base, ast.Attribute) else getattr(base, "id", "") for base in node.bases}
    return bool(bases & {"Enum", "IntEnum", "StrEnum", "NamedTuple"})


def _changed_names(module: ast.Module) -> Iterator[tuple[str, str]]:
    """Yield what functions mutate, as (name, attribute): of a bare name the attribute is empty."""

    def target(node: ast.expr) -> tuple[str, str] | None:
        if isinstance(node, ast.Name):
            return node.id, ""
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            return node.value.id, node.attr
        return None

    for function in ast.walk(module):
        if not isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            continue
        for node in ast.walk(function):
            changed: list[ast.expr] = []
            if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store | ast.Del):
                changed = [node.value]
            elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in _MUTATORS:
                changed = [node.func.value]
            elif isinstance(node, ast.AugAssign):
                changed = [node.target]
            yield from (place for item in changed if (place := target(item)) is not None)


def _imports(module: ast.Module) -> dict[str, str]:
    """Return the full names behind the names that a module imports."""
    imports = {}
    for node in ast.walk(module):
        if isinstance(node, ast.ImportFrom) and node.module and not node.level:
            imports.update({alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names})
    return imports


def find_state(modules: dict[str, ast.Module]) -> set[str]:
    """Return the module-level state, as ``module:name``."""
    bindings = {name: _bindings(module) for name, module in modules.items()}
    thawed = {
        f"{name}.{node.name}"
        for name, module in modules.items()
        for node in module.body
        if isinstance(node, ast.ClassDef) and not _is_frozen(node)
    }
    state, changed = set(), set()
    for name, module in modules.items():
        imports = _imports(module)
        for node in ast.walk(module):
            if isinstance(node, ast.Global):
                state |= {f"{name}:{item}" for item in node.names}
        for item, attribute in _changed_names(module):
            full = imports.get(item, "")
            if attribute and full in modules:
                changed.add(f"{full}:{attribute}")
            elif not attribute:
                changed.add(f"{full.rpartition('.')[0]}:{item}" if full else f"{name}:{item}")
        for item, value in bindings[name].items():
            called = _called(value)
            if called in _ALWAYS_STATE or imports.get(called, f"{name}.{called}") in thawed:
                state.add(f"{name}:{item}")
    for name, values in bindings.items():
        for item, value in values.items():
            mutable = isinstance(value, _DISPLAYS) or _called(value) in _COLLECTIONS
            if mutable and f"{name}:{item}" in changed:
                state.add(f"{name}:{item}")
    return {place for place in state if not place.endswith(":__all__")}


def test_no_module_keeps_state() -> None:
    state = find_state(_modules())
    assert state - set(ALLOWED) == set(), "give it an owner: a session, or an object that one holds"
    assert set(ALLOWED) - state == set(), "it has an owner now: remove it from the list"


@pytest.mark.parametrize(
    "source",
    [
        "state = []\ndef f(): state.append(1)",
        "state: dict[int, int] = {}\ndef f(): state[1] = 2",
        "state = [0]\ndef f(): state[:] = [1]",
        "state = deque(maxlen=2)\ndef f(): state.popleft()",
        "state = 0\ndef f():\n    global state\n    state = 1",
        "state = threading.Lock()",
        "state = weakref.WeakKeyDictionary()",
        "if True:\n    state = itertools.count()",
        "class Log:\n    def add(self): self.calls += 1\nstate = Log()",
    ],
)
def test_module_state_is_detected(source: str) -> None:
    assert find_state({"package.module": ast.parse(source)}) == {"package.module:state"}


def test_state_changed_by_another_module_is_detected() -> None:
    owner, by_name, by_module = (
        ast.parse(source)
        for source in (
            "one = []\ntwo = set()",
            "from package.owner import one\ndef f(): one.clear()",
            "from package import owner\ndef f(): owner.two.add(1)",
        )
    )
    modules = {"package.owner": owner, "package.name": by_name, "package.module": by_module}
    assert find_state(modules) == {"package.owner:one", "package.owner:two"}


@pytest.mark.parametrize(
    "source",
    [
        "TABLE = {1: 2}\ndef f(): return TABLE[1]",
        "NAMES = ['a']\ndef f():\n    names = []\n    names.append(1)",
        "@dataclass(frozen=True)\nclass Kind:\n    name: str\nKIND = Kind('a')",
        "class Kind(Struct, frozen=True):\n    name: str\nKIND = Kind('a')",
    ],
)
def test_constants_are_not_state(source: str) -> None:
    assert find_state({"package.module": ast.parse(source)}) == set()


@pytest.mark.parametrize(
    "source",
    [
        "x = torch.zeros(3)",
        "f(torch.tensor([1], dtype=torch.int64))",
        "torch.randn(2).to(torch.float64) + torch.ones(2)",
        "with torch.autocast('cpu'): pass",
        "torch.amp.GradScaler('cuda')",
    ],
)
def test_tensor_without_a_device_is_reported(source: str) -> None:
    assert [line for line, _ in places(source)] == [1]


@pytest.mark.parametrize(
    "source",
    [
        "torch.zeros(3, device=device)",
        "torch.zeros(3, device='cpu')",
        "torch.zeros(3, **options)",
        "(torch.tensor(values)[order] / 16).to(device)",
        "torch.zeros_like(x)",
        "torch.frombuffer(data, dtype=torch.uint8)",
        "np.zeros(3)",
        "torch.autocast(device.type)",
    ],
)
def test_tensor_with_a_device_is_accepted(source: str) -> None:
    assert list(places(source)) == []


def test_examples_and_library_name_their_devices() -> None:
    searched = files()
    assert {"examples", "comm", "engine", "parallel"} <= {part for path in searched for part in path.parts}
    assert [(str(path), place) for path in searched for place in places(path.read_text("utf-8"))] == []
