"""Which blocks of a model are alike, singly or in groups: proven by their state and by one traced forward.

Blocks are alike if their state is equal (their signatures), their forwards do the same with tensors from corresponding
places, and the work between them is equal, too. A model without some of them must do the same before, in and after
those that remain. Models such as Gemma repeat a group: five local blocks and a global one.

Two blocks have equal signatures if their classes, attributes, parameters, buffers and hooks are equal. What cannot be
compared by value counts as different, unless it is one object that both hold.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import ExitStack, contextmanager
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from msgspec import Struct, field
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

from axon_nb.parallel.data.units import num_parameters, rows_of_blocks

Signature = dict[tuple[Any, ...], Any]
"""Leaves by path. A path says through which attributes a leaf is reached."""
_PLAIN = (int, float, complex, str, bytes, bool, type(None), torch.dtype, torch.device, torch.Size)
_BY_NAME = (type, ModuleType, BuiltinFunctionType, CodeType)
_HEAP_TYPE = 1 << 9
"""Flag of classes that a `class` statement made (Py_TPFLAGS_HEAPTYPE)."""
_TENSORS = ("_parameters", "_buffers", "_modules")
_NUMBERED = "_hooks"
"""In the names of a module's hook dicts, whose keys are numbers that differ for each hook."""
_NEAR = 2
"""A tensor made at most this many blocks ago is named by the distance, any other one by its block."""
_PLAIN_LEAVES = (
    int,
    float,
    complex,
    str,
    bool,
    type(None),
    torch.dtype,
    torch.device,
    torch.layout,
    torch.memory_format,
)
_MAX_PERIOD = 16
"""Blocks in the largest group that is looked for."""


def signatures(
    model: nn.Module, blocks: Sequence[nn.Module], labels: Callable[[nn.Module], Any] | None = None
) -> list[Signature]:
    """Return each block's signature.

    An integer that counts blocks, such as a layer's index, is left out: no two blocks could be equal with it. The
    traced forward shows what a block does with it.

    Args:
        model: The model that contains them.
        blocks: The blocks in order.
        labels: What else distinguishes modules, such as how they are wrapped.
    """
    owners = Counter(id(tensor) for module in model.modules() for tensor in _own_tensors(module))
    readings = [_Reader(block, owners, labels).read() for block in blocks]
    for path in set(readings[0]) if len(readings) > 1 else ():
        values = [one.get(path) for one in readings]
        if all(type(value) is int for value in values) and len(set(values)) > 1:
            offsets = {value - number for number, value in enumerate(values) if isinstance(value, int)}
            if len(offsets) == 1:
                for one in readings:
                    del one[path]
    return readings


def _own_tensors(module: nn.Module) -> list[torch.Tensor]:
    return [tensor for held in (module._parameters, module._buffers) for tensor in held.values() if tensor is not None]


class _Reader:
    """Reads one block."""

    def __init__(self, block: nn.Module, owners: Mapping[int, int], labels: Callable[[nn.Module], Any] | None) -> None:
        self._inside = {id(module): name for name, module in block.named_modules()}
        self._block = block
        self._owners = owners
        counts = Counter(id(tensor) for module in block.modules() for tensor in _own_tensors(module))
        self._shared = {number for number, count in counts.items() if owners[number] > count}
        self._labels = labels
        self._leaves: Signature = {}
        self._visited: dict[int, tuple[tuple[Any, ...], Any]] = {}  # with the objects, so that no other gets their id

    def read(self) -> Signature:
        """Return all leaves."""
        for name, module in self._block.named_modules():
            self._leaves[name,] = type(module), module.training, self._labels(module) if self._labels else None
            for key, value in vars(module).items():
                if key not in _TENSORS:
                    numbered = _NUMBERED in key and isinstance(value, Mapping)
                    self._add((name, key), list(value.values()) if numbered else value)
            for kind in _TENSORS:
                for key, value in getattr(module, kind).items():
                    self._add((name, kind, key), value)
        return self._leaves

    def _add(self, path: tuple[Any, ...], value: Any) -> None:
        leaf = self._leaf(value)
        if leaf is not None:
            self._leaves[path] = leaf
            return
        if id(value) in self._visited:
            self._leaves[path] = "as", self._visited[id(value)][0]
            return
        self._visited[id(value)] = path, value
        self._leaves[path] = type(value)
        for key, part in _parts(value):
            self._add((*path, key), part)

    def _leaf(self, value: Any) -> Any:
        """Return what stands for a value; None: its parts do."""
        if isinstance(value, _PLAIN):
            return value if type(value) is int else (type(value), value)
        if isinstance(value, torch.Tensor):
            return self._tensor(value)
        if isinstance(value, nn.Module):
            inside = self._inside.get(id(value))
            return ("outside", id(value)) if inside is None else ("inside", inside)
        if isinstance(value, _BY_NAME):
            return "same", id(value)
        if isinstance(value, Set):
            return (
                (type(value), frozenset(value))
                if all(isinstance(one, _PLAIN) for one in value)
                else ("object", id(value))
            )
        return None if _has_parts(value) else ("object", id(value))

    def _tensor(self, tensor: torch.Tensor) -> Any:
        if id(tensor) in self._shared:
            # A parameter used elsewhere makes a block unlike all others; a buffer may be common to all of them.
            return "shared", id(tensor), isinstance(tensor, nn.Parameter) and id(self._block)
        hooks = getattr(tensor, "_backward_hooks", None), getattr(tensor, "_post_accumulate_grad_hooks", None)
        shape = tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype, tensor.requires_grad, type(tensor)
        return "tensor", shape, id(tensor) if any(hooks) else None


def _has_parts(value: Any) -> bool:
    if isinstance(value, Mapping | list | tuple | functools.partial | FunctionType | MethodType):
        return True
    # Only objects of classes defined in Python hold their whole state in their attributes.
    return hasattr(value, "__dict__") and all(
        base is object or (base.__flags__ & _HEAP_TYPE and not vars(base).get("__slots__"))
        for base in type(value).__mro__
    )


def _parts(value: Any) -> list[tuple[Any, Any]]:
    if isinstance(value, Mapping):
        return [(("key", key if isinstance(key, _PLAIN) else id(key)), part) for key, part in value.items()]
    if isinstance(value, list | tuple):
        return [("length", len(value)), *enumerate(value)]
    if isinstance(value, functools.partial):
        return [("func", value.func), ("args", value.args), ("keywords", value.keywords)]
    if isinstance(value, MethodType):
        return [("func", value.__func__), ("self", value.__self__)]
    if isinstance(value, FunctionType):
        cells = [cell.cell_contents if _is_filled(cell) else None for cell in value.__closure__ or ()]
        fields = [("code", value.__code__), ("defaults", value.__defaults__), ("more", value.__kwdefaults__)]
        return [*fields, *enumerate(cells)]
    return [("class", type(value)), *vars(value).items()]


def _is_filled(cell: Any) -> bool:
    try:
        return cell.cell_contents is not cell
    except ValueError:
        return False


class _Tensor(Struct, frozen=True):
    """A tensor in an operation: its storage, by order of appearance, and which view of it."""

    storage: int
    facts: tuple[Any, ...]


class _Event(Struct, frozen=True):
    """An operation, or the start or end of a block."""

    kind: str
    """``op``, ``enter`` or ``leave``."""
    name: str
    values: tuple[Any, ...] = ()
    made: tuple[_Tensor, ...] = ()


class ForwardTrace(Struct):
    """The events of a forward."""

    events: list[_Event] = field(default_factory=list)
    parameters: dict[int, str] = field(default_factory=dict)
    """Names of the storages of parameters and buffers."""


class Section(Struct, frozen=True):
    """What happens from the end of the block before to the end of this one."""

    before: tuple[Any, ...]
    """Operations ahead of the block, and where its inputs come from."""
    inside: tuple[Any, ...]
    """Operations of the block; its inputs are named by their position."""


class _Recorder(TorchDispatchMode):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.trace = ForwardTrace()
        self._numbers: dict[int, int] = {}
        self._alive: list[Any] = []  # so that no storage reuses another's address
        named = (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False))
        for name, tensor in named:
            self.trace.parameters.setdefault(self._number(tensor), name)

    def _number(self, tensor: torch.Tensor) -> int:
        storage = tensor.untyped_storage()
        if storage._cdata not in self._numbers:
            self._alive.append(storage)
            self._numbers[storage._cdata] = len(self._numbers)
        return self._numbers[storage._cdata]

    def tensor(self, value: torch.Tensor) -> _Tensor:
        facts = tuple(value.shape), tuple(value.stride()), value.storage_offset(), value.dtype, value.requires_grad
        return _Tensor(self._number(value), facts)

    def values(self, tree: Any) -> tuple[Any, ...]:
        leaves, shape = tree_flatten(tree)
        return shape, *(self._value(leaf) for leaf in leaves)

    def _value(self, leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            return self.tensor(leaf)
        return (type(leaf), leaf) if isinstance(leaf, _PLAIN_LEAVES) else (type(leaf), id(leaf))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        inputs = self.values((args, kwargs or {}))
        result = func(*args, **(kwargs or {}))
        made = tuple(self.tensor(one) for one in tree_flatten(result)[0] if isinstance(one, torch.Tensor))
        self.trace.events.append(_Event("op", str(func), inputs, made))
        return result


@contextmanager
def _watched(blocks: dict[str, nn.Module], recorder: _Recorder) -> Iterator[None]:
    events = recorder.trace.events
    with ExitStack() as stack:
        for name, block in blocks.items():

            def entered(_: Any, args: Any, kwargs: Any, name: str = name) -> None:
                events.append(_Event("enter", name, recorder.values((args, kwargs))))

            def left(_: Any, args: Any, output: Any, name: str = name) -> None:
                events.append(_Event("leave", name))

            before = block.register_forward_pre_hook(entered, prepend=True, with_kwargs=True)
            after = block.register_forward_hook(left)
            stack.callback(before.remove)
            stack.callback(after.remove)
        yield


def trace_forward(model: nn.Module, blocks: dict[str, nn.Module], forward: Callable[[], Any]) -> ForwardTrace:
    """Trace a forward on tensors without data.

    Args:
        model: The model.
        blocks: Its blocks of interest, by name.
        forward: Runs the forward and the loss.
    """
    recorder = _Recorder(model)
    with _watched(blocks, recorder), recorder:
        forward()
    return recorder.trace


def sections(trace: ForwardTrace, blocks: Sequence[str]) -> tuple[list[Section], tuple[Any, ...]] | None:
    """Return the section of each block, and what follows the last one.

    Args:
        trace: A forward.
        blocks: Names in the order in which the forward calls them.

    Returns:
        None if the forward does not call each block once, in order.
    """
    known = set(blocks)
    order = [(event.kind, event.name) for event in trace.events if event.name in known and event.kind != "op"]
    once = [(kind, name) for name in blocks for kind in ("enter", "leave")]
    return _Divider(trace, blocks).divide() if order == once else None


class _Divider:
    """Names tensors by the place where they were made."""

    def __init__(self, trace: ForwardTrace, blocks: Sequence[str]) -> None:
        self._trace = trace
        self._names = list(blocks)
        self._made: dict[int, tuple[int, str, int]] = {}
        """By storage: the section and the part of it that made it, and its number there."""
        self._counts: Counter[tuple[int, str]] = Counter()
        self._given: dict[int, int] = {}
        """Storages that no operation made, by order of appearance."""
        self._now = 0
        """The section."""
        self._part = "before"
        self._inputs: dict[int, int] = {}

    def divide(self) -> tuple[list[Section], tuple[Any, ...]]:
        """Return all sections and the rest."""
        known = set(self._names)
        divided: list[Section] = []
        parts: dict[str, list[Any]] = {"before": [], "inside": []}
        for event in self._trace.events:
            if event.kind == "op":
                parts[self._part].append(self._operation(event))
            elif event.name not in known:
                continue
            elif event.kind == "enter":
                parts["before"].append(tuple(map(self._named, event.values)))
                inputs = [value for value in event.values if isinstance(value, _Tensor)]
                self._inputs = {value.storage: number for number, value in enumerate(inputs)}
                self._part = "inside"
                parts["inside"].append(tuple(map(self._named, event.values)))
            else:
                divided.append(Section(tuple(parts["before"]), tuple(parts["inside"])))
                parts = {"before": [], "inside": []}
                self._part, self._inputs = "before", {}
                self._now += 1
        return divided, tuple(parts["before"])

    def _operation(self, event: _Event) -> tuple[Any, ...]:
        inputs = tuple(map(self._named, event.values))
        for tensor in event.made:
            if not (tensor.storage in self._made or tensor.storage in self._given):
                where = self._now, self._part
                self._made[tensor.storage] = *where, self._counts[where]
                self._counts[where] += 1
        return event.name, inputs, tuple(map(self._named, event.made))

    def _named(self, value: Any) -> Any:
        return (self._place(value.storage), value.facts) if isinstance(value, _Tensor) else value

    def _place(self, storage: int) -> Any:
        if storage in self._inputs:
            return "input", self._inputs[storage]
        if storage in self._made:
            section, part, number = self._made[storage]
            distance, is_head = self._now - section, not section and part == "before"
            near = distance <= _NEAR and not (is_head and self._now)
            return ("near", distance, part, number) if near else ("far", section, part, number)
        if (name := self._trace.parameters.get(storage)) is not None:
            prefix = f"{self._names[self._now]}." if self._part == "inside" else ""
            is_inside = bool(prefix) and name.startswith(prefix)
            return "parameter", name.removeprefix(prefix) if is_inside else name, is_inside
        return "given", self._given.setdefault(storage, len(self._given))


class BlockRun(Struct, frozen=True):
    """Consecutive blocks of a model, equal except for their weights; or equal groups of blocks."""

    names: tuple[str, ...]
    """Their names in the model."""
    period: int = 1
    """Number of blocks in a group; each is equal to the one at its place in any other group."""

    @property
    def depth(self) -> int:
        """Number of groups."""
        return len(self.names) // self.period

    def __str__(self) -> str:
        of = f"groups of {self.period} blocks" if self.period > 1 else "blocks"
        return f"{self.depth} equal {of}"


def shorten(model: nn.Module, run: BlockRun, depth: int) -> None:
    """Remove all but the first `depth` groups of a run."""
    path = run.names[0].rpartition(".")[0]
    container = model.get_submodule(path)
    for name in run.names[depth * run.period :]:
        del container._modules[name.rpartition(".")[2]]


class ProvenRuns:
    """The runs of a model whose blocks are proven alike.

    Args:
        model: The model on tensors without data, before it is wrapped.
        forward: Runs the forward and the loss of a model.
        labels: What else distinguishes modules, such as how they are wrapped.
    """

    def __init__(
        self,
        model: nn.Module,
        forward: Callable[[nn.Module], Any],
        labels: Callable[[nn.Module], Any] | None = None,
    ) -> None:
        self._model = model
        self._forward = forward
        self._labels = labels
        self.reason = ""
        """Why there is no run, for a model of many blocks."""

    def find(self, *, least: int, make: Callable[[BlockRun, int], nn.Module], depth: int) -> BlockRun | None:
        """Return the run with the most parameters in what can be left out; None if there is none.

        Args:
            least: Number of groups that a run must have.
            make: Makes the model with only some groups of a run.
            depth: How many groups such a model has to have to prove that the others can be left out.
        """
        rows: list[dict[str, nn.Module]] = []
        for row in rows_of_blocks(self._model):
            is_inner = any(next(iter(row), "").startswith(f"{name}.") for outer in rows for name in outer)
            if len(row) >= least and num_parameters(list(row.values())) and not is_inner:
                rows.append(row)
        if not rows:
            return None
        blocks = {name: block for row in rows for name, block in row.items()}
        states = {tuple(row): signatures(self._model, list(row.values()), self._labels) for row in rows}
        trace = self._traced(self._model, blocks)
        if trace is None:
            self.reason = "its forward cannot be traced block by block"
            return None
        runs = [run for row in rows for run in _runs(trace, row, states[tuple(row)], least)]
        for run in sorted(
            runs, key=lambda run: -num_parameters([blocks[name] for name in run.names[depth * run.period :]])
        ):
            row_names = next(list(row) for row in rows if run.names[0] in row)
            if self._holds(trace, row_names, run, make(run, depth), depth):
                return run
        count = max(map(len, rows))
        self.reason = f"its {count} blocks of class {type(next(iter(rows[0].values()))).__name__} are not alike"
        return None

    def _holds(self, trace: ForwardTrace, row: list[str], run: BlockRun, short: nn.Module, depth: int) -> bool:
        """Return whether a shortened model does the same as the full one, apart from the blocks left out."""
        gone = set(run.names[depth * run.period :])
        kept = [name for name in row if name not in gone]
        other = self._traced(short, {name: short.get_submodule(name) for name in kept})
        whole, part = sections(trace, row), sections(other, kept) if other else None
        if whole is None or part is None:
            return False
        stay = [section for name, section in zip(row, whole[0], strict=True) if name not in gone]
        return stay == part[0] and whole[1] == part[1]

    def _traced(self, model: nn.Module, blocks: Mapping[str, nn.Module]) -> ForwardTrace | None:
        try:
            return trace_forward(model, dict(blocks), lambda: self._forward(model))
        except Exception:
            return None  # the simulation of all blocks reports what is wrong


def _runs(trace: ForwardTrace, row: Mapping[str, nn.Module], states: list[Any], least: int) -> Iterator[BlockRun]:
    """Yield the longest run of each period, as far as it has enough groups."""
    names = list(row)
    divided = sections(trace, names)
    if divided is None:
        return
    kinds = _numbered([(state, section.inside) for state, section in zip(states, divided[0], strict=True)])
    joints = _numbered([section.before for section in divided[0]])
    for period in range(1, min(_MAX_PERIOD, len(names) // least) + 1):
        first, length = _longest(kinds, joints, period)
        if length // period >= least:
            yield BlockRun(tuple(names[first : first + length // period * period]), period)


def _longest(kinds: list[int], joints: list[int], period: int) -> tuple[int, int]:
    """First block and length of the longest stretch in which each block equals that `period` earlier."""
    best, first = (0, 0), 0
    for number in range(len(kinds)):
        if number - period >= first:
            same_joint = joints[number] == joints[number - period] or number - period == first
            if kinds[number] != kinds[number - period]:
                first = number - period + 1
            elif not same_joint:
                first = number - period
        if number + 1 - first > best[1]:
            best = first, number + 1 - first
    return best


def _numbered(values: list[Any]) -> list[int]:
    """Return numbers that are equal where the values are."""
    known_values: list[Any] = []
    numbers = []
    for value in values:
        numbers.append(next((number for number, known in enumerate(known_values) if known == value), len(known_values)))
        if numbers[-1] == len(known_values):
            known_values.append(value)
    return numbers
