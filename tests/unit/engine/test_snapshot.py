"""Snapshots of a session: after `restore`, every object, storage and generator is what it was, within a limit."""

from __future__ import annotations

import collections
import contextlib
import io
import pickle
import random
import threading
import weakref
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from axon_nb.engine.snapshot.data_kinds import TensorState
from axon_nb.engine.snapshot.history import CellSnapshot, History, TooLargeError, is_inert
from axon_nb.engine.snapshot.memory import HostMemory
from axon_nb.engine.snapshot.state import State, StateFinder

ENOUGH = 1 << 30
NOT_PICKLED = ("__builtins__", "step")

LIMIT = 1 << 19


class Counts:
    """The steps of optimizers, as a rank counts them."""

    def __init__(self) -> None:
        self.steps: dict[int, int] = {}

    def of(self, optimizer: torch.optim.Optimizer) -> int:
        return self.steps.get(id(optimizer), 0)

    def set(self, optimizer: torch.optim.Optimizer, steps: int) -> None:
        self.steps[id(optimizer)] = steps


class Run:
    """An object with attributes and slots."""

    __slots__ = ("__dict__", "best")

    def __init__(self) -> None:
        self.log: list[float] = []
        self.best = 0.5


def hook(*arguments: object) -> None:
    """Do nothing after a forward or a backward."""


SETUP = """
torch.manual_seed(0); np.random.seed(0); random.seed(0)
layers = torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.Dropout(0.5), torch.nn.Linear(8, 2)
model = torch.nn.Sequential(*layers)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2)
scaler = torch.amp.GradScaler("cpu")
data = torch.utils.data.TensorDataset(torch.randn(12, 4))
generator = torch.Generator().manual_seed(3)
draws = np.random.default_rng(5)
x = torch.arange(12.0)
rows = x.view(3, 4)
alias = x
mask = torch.ones(2)
array = np.arange(6.0)
shared = torch.from_numpy(array)
names = ["a", ["b", {"c": x}]]
table = collections.defaultdict(list, {"rows": [rows]})
order = collections.OrderedDict(a=1, b=2)
queue = collections.deque([1, x, 2], maxlen=4)
run = Run()
count = 3
step()
"""


def step_in(space: dict[str, Any]) -> Any:
    def step() -> float:
        model, optimizer = space["model"], space["optimizer"]
        optimizer.zero_grad()
        dtype = next(model.parameters()).dtype
        loss = model(torch.randn(6, 4).to(dtype)).square().mean()
        loss.backward()
        optimizer.step()
        return loss.item()

    return step


def session() -> dict[str, Any]:
    libraries = {"torch": torch, "np": np, "random": random, "collections": collections, "Run": Run}
    space: dict[str, Any] = {"__name__": "__main__", **libraries}
    space["step"], space["hook"] = step_in(space), hook
    exec(SETUP, space)
    return space


STATEMENTS = [
    "step()",
    "for i in range(3): step(); schedule.step()",
    "count += 1",
    "del count",
    "fresh = torch.ones(3)",
    "del alias, rows",
    "x = torch.zeros(2)",
    "alias[3:5] = 7",
    "x.data.fill_(1)",
    "rows.data = torch.ones(2)",
    "x.resize_(20)",
    "array[2] = -1",
    "array.shape = (2, 3)",
    "shared.mul_(2)",
    "names[1][1]['d'] = names; names.append(4)",
    "names[1] = None",
    "table['new'].append(x); del table['rows']",
    "order.move_to_end('a'); order['c'] = 3",
    "queue.append(5); queue.append(6)",
    "run.log.append(0.1); run.best = 9; run.extra = run",
    "del run.best",
    "optimizer.param_groups[0]['lr'] = 10.0",
    "optimizer.zero_grad(set_to_none=False)",
    "optimizer.zero_grad()",
    "optimizer.state.clear()",
    "optimizer.add_param_group({'params': [torch.nn.Parameter(torch.ones(2))]})",
    "optimizer = torch.optim.SGD(model.parameters(), lr=1.0)",
    "optimizer.load_state_dict(optimizer.state_dict())",
    "model.load_state_dict({k: v * 2 for k, v in model.state_dict().items()})",
    "model.eval()",
    "model.double()",
    "model[0].weight = torch.nn.Parameter(torch.zeros(8, 4))",
    "model[0].weight.requires_grad_(False)",
    "model[3].bias.grad = None",
    "model.register_buffer('extra', x); model.append(torch.nn.Identity())",
    "model[0].register_forward_hook(hook)",
    "model[0].weight.register_hook(hook); model[0].bias.register_post_accumulate_grad_hook(hook)",
    "model[0].weight.register_hook(hook).remove(); model[3].weight.register_hook(hook)",
    "with torch.no_grad(): model[3].weight.add_(1)",
    "schedule.step()",
    "scaler.update(new_scale=2.0)",
    "torch.rand(3); random.random(); np.random.rand(2)",
    "torch.rand(3, generator=generator); draws.random()",
    "torch.manual_seed(99)",
    "exec('raise ValueError')",
    "mask.requires_grad_(True)",
    "mask.mul_(model[3].bias)",
    "alias.copy_(torch.rand(12)); step(); exec('raise KeyError')",
]


class Fingerprint(pickle.Pickler):
    """Pickles identities, shared storages and bits of tensors; a pickle repeats which objects are the same."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self._storages: dict[int, int] = {}

    def reducer_override(self, value: Any) -> Any:
        """Return how to pickle one object."""
        if isinstance(value, torch.Generator):
            return bytes, (value.get_state().numpy().tobytes(),)
        if not isinstance(value, torch.Tensor):
            return NotImplemented
        bits = value.detach().clone().numpy().tobytes()  # without a copy, torch could not resize the storage any more
        storage = value.untyped_storage()
        number = self._storages.setdefault(storage.data_ptr(), len(self._storages))
        hooks = [list((one or {}).values()) for one in (value._backward_hooks, value._post_accumulate_grad_hooks)]
        facts = (id(value), number, value.storage_offset(), value.stride(), storage.nbytes(), hooks)
        return tuple, (
            (bits, value.dtype, value.requires_grad, value.grad if value.is_leaf else None, vars(value), *facts),
        )


def fingerprint(space: dict[str, Any]) -> bytes:
    """Everything in the session, and the generators that all libraries share."""
    kinds = (type, type(random))
    items = sorted(space.items())
    names = {name: value for name, value in items if name not in NOT_PICKLED and not isinstance(value, kinds)}
    ids = {name: id(value) for name, value in names.items()}
    file = io.BytesIO()
    Fingerprint(file).dump((names, ids, torch.get_rng_state().tolist(), random.getstate(), np.random.get_state()))
    return file.getvalue()


def found(cell: CellSnapshot) -> dict[str, Any]:
    """What the state before a cell has, each object by its identity."""
    assert cell.snapshot is not None
    return facts(cell.snapshot.state)


def found_by_a_fresh_walk(space: dict[str, Any]) -> dict[str, Any]:
    return facts(StateFinder(space).find_within(ENOUGH))


def facts(state: State) -> dict[str, Any]:
    tensors = {id(item): tuple(map(id, saved)) for _, item, saved in state.nodes if isinstance(saved, TensorState)}
    for _, item, saved in state.nodes:
        if isinstance(saved, TensorState):
            assert saved.version is None or saved.version == item._version
    return {
        "names": {name: id(value) for name, value in state.names.items()},
        "objects": sorted((id(item), type(saved).__name__) for _, item, saved in state.nodes),
        "same": all(kind.same is None or kind.same(item, saved) for kind, item, saved in state.nodes),
        "leaves": sorted((id(item), str(saved)) for kind, item, saved in state.nodes if kind.same is None),
        "tensors": len(tensors),
        "storages": {key: (facts.size, facts.versions) for key, facts in state.storages.items()},
        "empty": len(state.empty),
        "optimizers": sorted(map(id, state.optimizers)),
        "obstacles": state.obstacles,
        "left_out": state.left_out.keys(),
        "structure": state.structure,
    }


@settings(max_examples=15)
@given(st.lists(st.lists(st.sampled_from([*STATEMENTS, "del model", "keep = [model]"]), max_size=3), max_size=6))
def test_walk_that_knows_the_last_one_finds_what_a_fresh_one_does(cells: list[list[str]]) -> None:
    space = session()
    history = History(space, Counts(), HostMemory())
    for number, statements in enumerate(cells):
        history.before_cell(str(number), number, (0,), ENOUGH)
        assert found(history.cells[-1]) == found_by_a_fresh_walk(space)
        for statement in statements:
            with contextlib.suppress(Exception):
                exec(statement, space)
    history.before_cell("last", 9, (0,), ENOUGH)
    assert found(history.cells[-1]) == found_by_a_fresh_walk(space)


def test_cell_that_can_change_nothing_needs_no_snapshot_and_is_undone_as_well() -> None:
    space: dict[str, Any] = {"n": [1]}
    history = History(space, Counts(), HostMemory())
    codes = ["n.append(2)", "", "# nothing\n", "pass", "n.append(3)", "'a'\n..."]
    for number, code in enumerate(codes):
        history.before_cell(str(number), number, (0,), ENOUGH, code)
        exec(code, space)
    assert [cell.snapshot is None for cell in history.cells] == [False, True, True, True, False, True]
    space["n"].append(4)  # as a thread does between two cells
    assert history.undo("5") == []
    assert space["n"] == [1, 2, 3, 4]
    assert history.undo("2") == []
    assert space["n"] == [1, 2]
    assert [cell.run for cell in history.cells] == ["0", "1"]
    assert history.undo("0") == []
    assert (space["n"], history.cells) == ([1], [])


@pytest.mark.parametrize(
    "code", ["n", "f()", "n + 1", "n.x", "%time 1", "!ls", "x = 1", "del n", "f'{n}'", "[1]", "1;" * 101]
)
def test_cell_that_may_run_something_gets_a_snapshot(code: str) -> None:
    assert not is_inert(code)


@settings(max_examples=25)
@given(st.lists(st.sampled_from(STATEMENTS), min_size=1, max_size=6), st.lists(st.sampled_from(STATEMENTS), max_size=3))
def test_session_is_bit_equal_after_undo(program: list[str], earlier: list[str]) -> None:
    space, counts = session(), Counts()
    history = History(space, counts, HostMemory())
    states = []
    for number, statements in enumerate((earlier, program)):
        states.append(fingerprint(space))
        history.before_cell(str(number), number, (0,), ENOUGH)
        for statement in statements:
            with contextlib.suppress(Exception):
                exec(statement, space)
    for number in (1, 0):
        assert history.undo(str(number)) == []
        assert fingerprint(space) == states[number]


def test_closures_classes_and_iterators_are_undone() -> None:
    space: dict[str, Any] = {"__name__": "__main__"}
    source = """
class Config:
    rate = 1

def counter():
    n = 0
    def add():
        nonlocal n
        n += 1
        return n
    return add

add = counter()
add()
numbers = iter([1, 2, 3])
"""
    exec(source, space)
    history = History(space, Counts(), HostMemory())
    history.before_cell("run", 1, (0,), ENOUGH)
    exec("Config.rate = 2; Config.extra = 3; add(); add(); next(numbers)", space)
    history.undo("run")
    assert (space["Config"].rate, hasattr(space["Config"], "extra")) == (1, False)
    assert (space["add"](), next(space["numbers"])) == (2, 1)


def test_optimizer_that_only_its_schedule_still_has_is_undone() -> None:
    space = session()
    history = History(space, Counts(), HostMemory())
    history.before_cell("earlier", 1, (0,), ENOUGH)
    exec("optimizer = torch.optim.SGD(model.parameters(), lr=1.0)", space)
    history.before_cell("run", 2, (0,), ENOUGH)
    exec("schedule.optimizer.param_groups[0]['lr'] = 9.0", space)
    history.undo("run")
    assert space["schedule"].optimizer.param_groups[0]["lr"] == 0.01


def test_hooks_of_tensors_are_undone() -> None:
    weight = torch.ones(2, requires_grad=True)
    space: dict[str, Any] = {"weight": weight, "doubled": weight * 2, "seen": []}
    doubling = weight.register_hook(lambda gradient: gradient * 2)
    history = History(space, Counts(), HostMemory())
    history.before_cell("run", 1, (0,), ENOUGH)
    doubling.remove()
    weight.register_hook(lambda gradient: gradient * 100)
    weight.register_post_accumulate_grad_hook(space["seen"].append)
    space["doubled"].register_hook(lambda gradient: gradient * 100)
    history.undo("run")
    space["doubled"].sum().backward()
    assert (weight.grad is not None and weight.grad.tolist(), space["seen"]) == ([4.0, 4.0], [])


def test_what_cannot_be_restored_is_named_by_variable(tmp_path: Any) -> None:
    with (tmp_path / "log").open("w") as file:
        space = {"squares": (n * n for n in range(3)), "log": [file], "sparse": torch.eye(2).to_sparse(), "n": 1}
        obstacles = History(space, Counts(), HostMemory()).hold("try", ENOUGH)
    assert obstacles == {"squares": "a generator", "log": "an open file", "sparse": "a sparse tensor"}


def test_only_changed_storages_are_copied_again() -> None:
    space: dict[str, Any] = {"big": torch.zeros(1 << 18), "small": torch.zeros(16), "hidden": torch.zeros(1 << 10)}
    history = History(space, Counts(), HostMemory())
    history.before_cell("1", 1, (0,), ENOUGH)
    assert history.size == (1 << 20) + 64 + (1 << 12)
    space["small"].add_(1)
    space["hidden"].numpy()[5] = 1  # which no version counter sees
    history.before_cell("2", 2, (0,), ENOUGH)
    assert history.size == (1 << 20) + 2 * (64 + (1 << 12))


def test_oldest_snapshots_go_when_memory_runs_out() -> None:
    space: dict[str, Any] = {"weights": torch.zeros(1 << 18)}
    history = History(space, Counts(), HostMemory())
    for number in range(5):
        history.before_cell(str(number), number, (0,), (3 << 20) + (1 << 12))
        space["weights"].add_(1)
    assert [cell.run for cell in history.cells if cell.snapshot is not None] == ["2", "3", "4"]
    history.undo("2")
    assert space["weights"].unique().tolist() == [2]


def test_memory_that_only_snapshots_keep_counts() -> None:
    space: dict[str, Any] = {"weights": torch.zeros(1 << 18)}
    history = History(space, Counts(), HostMemory())
    history.before_cell("1", 1, (0,), ENOUGH)
    space["weights"] = torch.zeros(1 << 4)
    history.before_cell("2", 2, (0,), ENOUGH)
    assert history.size == (2 << 20) + 64


def test_held_state_above_the_limit_is_refused() -> None:
    history = History({"weights": torch.zeros(1 << 18)}, Counts(), HostMemory())
    with pytest.raises(TooLargeError, match=r"has a state of 1.00 MiB, more than 512 KiB"):
        history.hold("try", 1 << 19)


def test_tensor_subclass_that_refuses_functions_is_restored() -> None:
    class Refusing(torch.Tensor):
        @classmethod
        def __torch_function__(cls, *arguments: object) -> object:
            raise LookupError

    values = torch.zeros(3)
    history = History({"odd": values.as_subclass(Refusing)}, Counts(), HostMemory())
    history.before_cell("1", 1, (0,), ENOUGH)
    values.add_(1)
    history.undo("1")
    assert values.tolist() == [0, 0, 0]


def limited_session() -> dict[str, Any]:
    model = torch.nn.Linear(512, 512)
    return {
        "__name__": "__main__",
        "model": model,
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
        "small": torch.zeros(4),
        "losses": [0.5],
    }


def run(history: History, space: dict[str, Any], statement: str, number: int = 1) -> None:
    history.before_cell(str(number), number, (0,), LIMIT)
    exec(statement, {"torch": torch}, space)


def changed(history: History) -> list[str]:
    return history.changed_above_limit(history.cells[-1])


def test_small_variables_are_undone_beside_a_model_above_the_limit() -> None:
    space = limited_session()
    history = History(space, Counts(), HostMemory())
    run(history, space, "small.add_(1); losses.append(0.4); extra = 1; model(torch.ones(1, 512))")
    assert changed(history) == []
    snapshot = history.cells[-1].snapshot
    assert snapshot is not None
    assert sorted(snapshot.state.obstacles) == ["model", "optimizer"], "what shares the weights is left out with them"
    assert snapshot.state.obstacles["model"].startswith("needs 1.")
    assert history.undo("1") == []
    assert (space["small"].tolist(), space["losses"], "extra" in space) == ([0.0] * 4, [0.5], False)
    assert isinstance(space["model"], torch.nn.Linear)


@pytest.mark.parametrize(
    ("statement", "names"),
    [
        ("model(torch.ones(1, 512)).sum().backward()", ["model"]),
        ("with torch.no_grad(): model.bias.add_(1)", ["model"]),
        ("model = torch.nn.Linear(2, 2)", ["model"]),
        ("del optimizer", ["optimizer"]),
    ],
)
def test_change_above_the_limit_is_noticed(statement: str, names: list[str]) -> None:
    space = limited_session()
    history = History(space, Counts(), HostMemory())
    run(history, space, statement)
    assert changed(history) == names


def test_variable_with_too_many_objects_is_left_out_and_its_tensors_are_watched() -> None:
    space = limited_session()
    space["rows"] = [[torch.zeros(1)], [{"number": number} for number in range(200_000)]]
    history = History(space, Counts(), HostMemory())
    for number in (1, 2):
        run(history, space, "small.add_(1)", number)
        snapshot = history.cells[-1].snapshot
        assert snapshot is not None
        assert snapshot.state.obstacles["rows"] == "needs more than 512 KiB of `undo_memory`"
        assert len(snapshot.state.nodes) < 100
    assert changed(history) == []
    space["rows"][0][0].add_(1)
    assert changed(history) == ["rows"]
    assert history.undo("1") == []
    assert space["small"].tolist() == [0.0] * 4


def test_snapshots_do_not_keep_alive_what_has_outgrown_the_limit() -> None:
    space: dict[str, Any] = {"cache": {}, "small": torch.zeros(4)}
    history = History(space, Counts(), HostMemory())
    run(history, space, "cache['big'] = torch.zeros(1 << 20)", 1)
    alive = weakref.ref(space["cache"]["big"])
    run(history, space, "del cache", 2)
    assert alive() is None
    assert [cell.run for cell in history.cells] == ["2"]


def test_deleted_generator_and_thread_end_at_once() -> None:
    space = limited_session() | {"thread": threading.Thread(), "items": (number for number in range(9))}
    kept = [weakref.ref(space[name]) for name in ("thread", "items")]
    history = History(space, Counts(), HostMemory())
    run(history, space, "del thread, items")
    assert [ref() for ref in kept] == [None, None]
    snapshot = history.cells[-1].snapshot
    assert snapshot is not None
    assert {"thread", "items"} <= snapshot.state.obstacles.keys()
    assert history.undo("1") == []
    assert "thread" not in space
