"""The global batch of a compared cell: variables and cuts of which each rank has a part, found and joined on one rank.

Variables are found by what they contain. What a cell cuts from its data by rank, in whatever way, is found by what it
passes to modules and functions.
"""

from __future__ import annotations

import ast
import hashlib
import inspect
import os
import types
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from msgspec import Struct
from torch.overrides import TorchFunctionMode

from axon_nb.comm.placements import placed
from axon_nb.engine.frames import is_cell
from axon_nb.errors import UsageError
from axon_nb.records.training.digests import Place

LeafPath = tuple[Any, ...]
_TORCH, _AXON = os.path.dirname(torch.__file__), str(Path(__file__).parents[2])
_INSIDE = tuple(
    os.path.join(_TORCH, *path)
    for path in (("autograd", ""), ("optim", ""), ("distributed", ""), ("utils", "data", ""), ("nn", "utils", ""),
                 ("utils", "checkpoint.py"))
)  # fmt: skip
"""Code of torch that makes its own tensors: what it passes to functions is not from the cell's batch."""
_WRAPPERS = os.path.join(_AXON, "parallel", "")
_PIPELINES = os.path.join(_AXON, "parallel", "pipeline", "")
_MODULE = "module "
Key = tuple[Any, ...]
"""Line of the cell, function or module, how often it ran there, and the path of the argument."""


class Batch(Struct):
    """The joined parts of the global batch."""

    leaves: dict[LeafPath, torch.Tensor]
    """On rank 0, the whole tensors, by name of the variable and keys within."""
    places: dict[int, Place]
    """The part of each rank."""

    @property
    def names(self) -> tuple[str, ...]:
        """The variables."""
        return tuple(dict.fromkeys(str(path[0]) for path in self.leaves))


def mentioned_names(code: str, namespace: Mapping[str, Any]) -> set[str]:
    """Return the variables that a cell uses, also within the functions that it calls.

    Not those that it assigns before, with what an earlier run left in them.

    Args:
        code: The cell, as Python.
        namespace: The variables.
    """
    found: set[str] = set()
    todo = list(_read_names(ast.parse(code).body, set()))
    while todo:
        name = todo.pop()
        if name in found or name not in namespace:
            continue
        found.add(name)
        value = namespace[name]
        if isinstance(value, types.FunctionType) and value.__globals__ is namespace:
            todo += _names_of(value.__code__)
    return found


def _read_names(statements: Iterable[ast.stmt], assigned: set[str]) -> Iterator[str]:
    """Yield the names that statements read before they surely assign them; `assigned` grows."""
    for statement in statements:
        match statement:
            case ast.With():
                yield from _loaded(statement.items, assigned)
                yield from _read_names(statement.body, assigned)
                continue
            case ast.For():
                yield from _loaded([statement.iter], assigned)
                yield from _read_names(statement.body, assigned | _stored([statement.target]))
                yield from _read_names(statement.orelse, {*assigned})
                continue
        yield from _loaded([statement], assigned)
        if isinstance(statement, ast.Assign):
            assigned |= _stored(statement.targets)


def _stored(targets: Iterable[ast.AST]) -> set[str]:
    names = [node for target in targets for node in ast.walk(target) if isinstance(node, ast.Name)]
    return {node.id for node in names if isinstance(node.ctx, ast.Store)}


def _loaded(nodes: Iterable[ast.AST], assigned: set[str]) -> Iterator[str]:
    names = [node for top in nodes for node in ast.walk(top) if isinstance(node, ast.Name)]
    updated = {id(node.target) for top in nodes for node in ast.walk(top) if isinstance(node, ast.AugAssign)}
    for node in names:
        if node.id not in assigned and (not isinstance(node.ctx, ast.Store) or id(node) in updated):
            yield node.id


def _names_of(code: types.CodeType) -> list[str]:
    inner = [name for part in code.co_consts if isinstance(part, types.CodeType) for name in _names_of(part)]
    return [*code.co_names, *inner]


def is_leaf(tensor: torch.Tensor) -> bool:
    """Whether a tensor can be a part of a batch."""
    return bool(tensor.ndim) and not tensor.requires_grad and placed(tensor) is None


def leaves_of(value: Any, path: LeafPath) -> Iterable[tuple[LeafPath, torch.Tensor]]:
    """Yield the tensors within a value that can be parts of a batch, with their paths."""
    if isinstance(value, torch.Tensor):
        if is_leaf(value):
            yield path, value
    elif type(value) in (list, tuple):
        for key, item in enumerate(value):
            yield from leaves_of(item, (*path, key))
    elif type(value) is dict:
        for key, item in value.items():
            yield from leaves_of(item, (*path, key))


def replace_leaves(value: Any, path: LeafPath, change: Callable[[LeafPath, torch.Tensor], torch.Tensor]) -> Any:
    """Return a copy of a value with other tensors; containers are copied, and everything else is the same object."""
    if isinstance(value, torch.Tensor):
        return change(path, value)
    if type(value) in (list, tuple):
        return type(value)(replace_leaves(item, (*path, key), change) for key, item in enumerate(value))
    if type(value) is dict:
        return {key: replace_leaves(item, (*path, key), change) for key, item in value.items()}
    return value


def gather(value: Any) -> list[Any]:
    """Return the values of all ranks, on all of them; collective."""
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def gather_on_first(value: Any) -> list[Any] | None:
    """Return the values of all ranks on rank 0, and None on the others; collective."""
    values: list[Any] | None = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
    dist.gather_object(value, values)
    return values


def gather_batch(namespace: Mapping[str, Any], names: Iterable[str]) -> Batch:
    """Find the variables that differ between ranks, and join their parts on rank 0; collective over all ranks.

    Ranks with the same content, such as those of one tensor-parallel group, have the same part.

    Args:
        namespace: The variables.
        names: Those that the cell uses.

    Raises:
        UsageError: the parts do not fit together; on all ranks.
    """
    held = {path: leaf for name in sorted(names) for path, leaf in leaves_of(namespace[name], (name,))}
    sums = {path: (tuple(leaf.shape), str(leaf.dtype), checksum(leaf)) for path, leaf in held.items()}
    answers = gather(sums)
    everywhere = [path for path in sums if all(path in answer for answer in answers)]
    split = [path for path in everywhere if len({answer[path][2] for answer in answers}) > 1]
    for path in split:
        if len({(shape[1:], dtype) for shape, dtype, _ in (answer[path] for answer in answers)}) > 1:
            name = path[0]
            raise UsageError(
                f"--compare joins `{name}` along its first dimension, but its other dimensions differ between ranks: "
                "pad them, or give all ranks the same."
            )
    contents = [tuple(answer[path][2] for path in split) for answer in answers]
    parts = list(dict.fromkeys(contents))
    owners = [contents.index(part) for part in parts]
    sizes = [answers[owner][split[0]][0][0] if split else 1 for owner in owners]
    for path in split:
        if [answers[owner][path][0][0] for owner in owners] != sizes:
            raise UsageError(
                f"--compare joins `{split[0][0]}` and `{path[0]}` to the global batch, but the parts of a rank have "
                "different lengths: give what is not part of the batch the same values on all ranks."
            )
    places = places_of(contents, sizes)
    mine = {path: held[path].detach().cpu() for path in split} if dist.get_rank() in owners else {}
    gathered = gather_on_first(mine)
    if gathered is None:
        return Batch(dict.fromkeys(split, torch.empty(0, device="cpu")), places)
    joined = {path: torch.cat([gathered[owner][path] for owner in owners]).to(held[path].device) for path in split}
    return Batch(joined, places)


def places_of(contents: Sequence[Any], sizes: Sequence[int]) -> dict[int, Place]:
    """Return the place of each rank.

    Args:
        contents: Of each rank; ranks with equal ones have the same part.
        sizes: Rows of each part, in the order in which the parts first occur.
    """
    parts, places = list(dict.fromkeys(contents)), {}
    for rank, content in enumerate(contents):
        part, peers = parts.index(content), [peer for peer, other in enumerate(contents) if other == content]
        places[rank] = Place(sum(sizes[:part]), sizes[part], sum(sizes), peers.index(rank), len(peers))
    return places


def checksum(tensor: torch.Tensor) -> str:
    """Return a digest of a tensor's bytes."""
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return hashlib.sha256(flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b"").hexdigest()


class Part(NamedTuple):
    """One argument on one rank."""

    shape: tuple[int, ...]
    dtype: str
    content: str
    where: tuple[int, ...]
    """Its offset and strides within what it was cut from: parts may have equal contents, such as labels."""
    is_view: bool = False
    """Whether it is nothing but a cut of a variable, such as a microbatch."""


class Joined(NamedTuple):
    """What the reference passes on instead."""

    whole: dict[Key, torch.Tensor]
    equal: dict[Key, torch.Tensor]
    """Parts that are equal on all ranks, perhaps by chance, as labels may be."""
    same: dict[Key, str]
    """What modules get, as checksums, if it is the same on all ranks."""
    calls: dict[str, int]
    microbatches: dict[Key, torch.Tensor] = {}  # noqa: RUF012 - never changed where it is not given
    """What a rank cuts from its part of a variable, which one rank would cut from all of it in another order."""


class CellEnded(BaseException):  # not an Exception: the cell must not catch it
    """The reference did all that the ranks did. With a world of one, loops over data have more rounds."""


class Cuts(TorchFunctionMode):
    """Sees the tensors that the cell passes to functions and modules, but not those that come from a model.

    Args:
        namespace: The cell's variables.
        visit: Takes a tensor and its key; returns what to pass on instead, or None.
        derived: Tensors that `visit` need not see, nor what is computed from them.
        calls: How often the cell may call each module; no limit for others.
        recut: As `visit`, for what is computed from `derived` or by a module.
    """

    def __init__(
        self,
        namespace: Mapping[str, Any],
        visit: Callable[[Key, torch.Tensor], torch.Tensor | None],
        derived: Sequence[torch.Tensor] = (),
        calls: Mapping[str, int] | None = None,
        recut: Callable[[Key, torch.Tensor], torch.Tensor | None] = lambda key, tensor: None,
    ) -> None:
        super().__init__()
        self._namespace, self._visit, self._limits, self._recut = namespace, visit, calls or {}, recut
        self._derived: dict[int, weakref.ref[torch.Tensor]] = {}
        self._rounds: Counter[tuple[int, str]] = Counter()
        self._depth = 0
        self.calls: Counter[str] = Counter()
        """How often the cell called each module."""
        for tensor in derived:
            self._derive(tensor)

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Call a function of torch."""
        line = None if self._depth else self._line(1)
        if line is None:
            return func(*args, **kwargs or {})
        args, kwargs, is_derived = self._pass(line, getattr(func, "__name__", ""), args, kwargs or {})
        result = func(*args, **kwargs)
        if is_derived:
            self._derive(result)
        return result

    def enter_module(self, path: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        """Begin a call of a module, and return its arguments.

        Raises:
            CellEnded: it is called more often than it may be.
        """
        self._depth += 1
        line = None if self._depth > 1 else self._line(2)
        if line is None:
            return args, kwargs
        self.calls[path] += 1
        if self.calls[path] > self._limits.get(path, self.calls[path]):
            raise CellEnded
        args, kwargs, _ = self._pass(line, _MODULE + path, args, kwargs)
        return args, kwargs

    def leave_module(self, output: Any) -> None:
        """End a call of a module."""
        self._depth -= 1
        if not self._depth:
            self._derive(output)

    def _line(self, own: int) -> int | None:
        """Return the line of the cell that runs; None: code between it and the call makes its own tensors.

        Args:
            own: How many of the innermost frames are ours.
        """
        frame = inspect.currentframe()
        for _ in range(1 + own):
            frame = frame.f_back if frame is not None else None
        while frame is not None:
            if frame.f_globals is self._namespace and is_cell(frame.f_code):
                return frame.f_lineno
            file = frame.f_code.co_filename
            if file.startswith(_INSIDE) or (file.startswith(_AXON) and not file.startswith(_WRAPPERS)):
                return None
            if file.startswith(_PIPELINES):
                return None
            frame = frame.f_back
        return None

    def _pass(
        self, line: int, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any], bool]:
        self._rounds[line, name] += 1
        place = line, name, self._rounds[line, name]
        is_derived = False

        def passed(path: tuple[Any, ...], tensor: torch.Tensor) -> torch.Tensor:
            nonlocal is_derived
            if tensor.requires_grad or id(tensor) in self._derived:
                is_derived = True
                if (other := self._recut((*place, *path), tensor)) is not None:
                    return other
            # A mask is as long as what it selects from: what it selects is the part.
            elif (
                type(tensor) is torch.Tensor
                and is_leaf(tensor)
                and not (name == "__getitem__" and tensor.dtype == torch.bool)
                and (other := self._visit((*place, *path), tensor)) is not None
            ):
                is_derived = True
                return other
            return tensor

        args, kwargs = replace_leaves((args, kwargs), (), passed)
        return args, kwargs, is_derived

    def _derive(self, value: Any) -> None:
        """Note what comes from a model, or from what `visit` returned."""
        if isinstance(value, torch.Tensor):
            key, derived = id(value), self._derived
            derived[key] = weakref.ref(value, lambda _: derived.pop(key, None))
        elif isinstance(value, Mapping):
            self._derive(list(value.values()))
        elif isinstance(value, list | tuple):
            for item in value:
                self._derive(item)


class Parts:
    """What the cell passes on, on one rank.

    Args:
        known: Tensors from before the cell, which are the same on all ranks or parts of the batch already.
    """

    def __init__(self, known: Sequence[torch.Tensor]) -> None:
        self._known = {id(tensor): tensor for tensor in known}
        self._storages = {_address(tensor) for tensor in known}
        self.of: dict[Key, Part] = {}
        self.contents: dict[str, torch.Tensor] = {}
        """Copies, by the checksum."""

    def note(self, key: Key, tensor: torch.Tensor) -> None:
        """Take a tensor."""
        if id(tensor) in self._known or tensor.layout != torch.strided or tensor.device.type == "meta":
            return
        content = checksum(tensor)
        where = int(tensor.storage_offset()), *tensor.stride()
        self.of[key] = Part(tuple(tensor.shape), str(tensor.dtype), content, where, _address(tensor) in self._storages)
        if content not in self.contents:
            self.contents[content] = tensor.detach().cpu().clone()


def _address(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr() if tensor.layout == torch.strided else 0


def gather_cuts(parts: Parts, calls: Mapping[str, int], batch: Batch) -> Joined:
    """Join on rank 0 what differs between ranks; collective over all ranks.

    Where the batch has no variables, what the models get decides which part of it each rank has.

    Args:
        parts: What the cell passed on, on this rank.
        calls: How often it called each module.
        batch: Gets the places of the ranks.

    Raises:
        UsageError: what the models get cannot be joined; on all ranks.
    """
    answers = gather((parts.of, dict(calls)))
    held: list[dict[Key, Part]] = [of for of, _ in answers]
    most: Counter[str] = Counter()
    for _, of_rank in answers:
        most |= Counter(of_rank)
    common = [key for key in held[0] if all(key in of for of in held)]
    split = {key: ids for key in common if len(set(ids := _identities([of[key] for of in held]))) > 1}
    if not batch.leaves:
        _find_places([key for key in split if _is_module(key)], split, held, batch)
    places = batch.places
    owners = [rank for rank, place in places.items() if place.index == 0]
    if len(owners) == 1:
        return Joined({}, {}, {key: held[0][key].content for key in common if _is_module(key)}, most)
    microbatches = _microbatches(list(split), held, places) if batch.leaves else []
    totals = {places[0].total, *(sum(held[owner][key].shape[0] for owner in owners) for key in microbatches)}
    chosen = [key for key in common if _fits([of[key] for of in held], split.get(key), places, owners, totals)]
    mine = {parts.of[key].content for key in chosen} if dist.get_rank() in owners else ()
    shared = gather_on_first({content: parts.contents[content] for content in mine})
    joined = Joined({}, {}, {}, most)
    known: dict[tuple[str, ...], torch.Tensor] = {}
    if shared is None:
        return joined
    for key in chosen:
        contents = tuple(held[owner][key].content for owner in owners)
        if contents not in known:
            tensors = [shared[owner][content] for owner, content in zip(owners, contents, strict=True)]
            known[contents] = torch.cat(tensors)
        if key in split:
            joined.whole[key] = known[contents]
        elif _may_be_equal(known[contents]):
            joined.equal[key] = known[contents]
    if not microbatches:
        return joined
    found = joined.whole | joined.equal
    views = {key: tensor for key, tensor in found.items() if all(of[key].is_view for of in held)}
    # Labels that are equal on all ranks are cut like the rows that they belong to.
    return joined._replace(whole=joined.whole | views, microbatches=views)


def _microbatches(keys: Sequence[Key], held: Sequence[Mapping[Key, Part]], places: Mapping[int, Place]) -> list[Key]:
    """Return what a model gets call by call, if that is all of each rank's part of the batch: no row less or more."""
    arguments = {(key[1], *key[3:]) for key in keys if _is_module(key)}
    for argument in arguments:
        calls = [key for key in keys if (key[1], *key[3:]) == argument]
        rows = {rank: sum(held[rank][key].shape[0] for key in calls) for rank in places}
        is_cut = all(held[rank][key].is_view for rank in places for key in calls)
        if len(calls) > 1 and is_cut and all(rows[rank] == place.length for rank, place in places.items()):
            return calls
    return []


def _is_module(key: Key) -> bool:
    """Whether the argument is one of a module that is compared."""
    return bool(key[1].startswith(_MODULE))


def _may_be_equal(tensor: torch.Tensor) -> bool:
    """Whether the parts may have equal values although they are different rows."""
    return not (tensor.is_floating_point() or tensor.is_complex()) or tensor.unique().numel() <= 2


def _identities(parts: Sequence[Part]) -> list[Any]:
    """Return values that differ between ranks with different parts."""
    contents = [part.content for part in parts]
    return contents if len(set(contents)) > 1 else [part.where for part in parts]


def _find_places(keys: Sequence[Key], split: Mapping[Key, list[Any]], held: Sequence[Any], batch: Batch) -> None:
    """Set the places of the ranks from what their models get."""
    if not keys:
        return
    for key in keys:
        if len({(of[key].shape[1:], of[key].dtype) for of in held}) > 1:
            raise UsageError(
                "--compare joins what the model gets along the first dimension, but the other dimensions differ "
                "between ranks: pad them."
            )
    contents = list(zip(*(split[key] for key in keys), strict=True))
    owners = [contents.index(content) for content in dict.fromkeys(contents)]
    batch.places = places_of(contents, [held[owner][keys[0]].shape[0] for owner in owners])


def _fits(
    parts: Sequence[Part],
    identities: Sequence[Any] | None,
    places: Mapping[int, Place],
    owners: Sequence[int],
    totals: Set[int],
) -> bool:
    """Whether the tensors of the ranks are parts of the batch; equal ones have as many rows as a part of it may."""
    if len({(part.shape[1:], part.dtype) for part in parts}) > 1:
        return False
    by_start = {places[owner].start: owner for owner in owners}
    own = [by_start[places[rank].start] for rank in range(len(parts))]
    if identities is not None and any(identities[rank] != identities[owner] for rank, owner in enumerate(own)):
        return False
    rows = sum(parts[owner].shape[0] for owner in owners)
    if identities is None and rows not in totals:
        return False
    return all(parts[owner].shape[0] * places[0].total == rows * places[owner].length for owner in owners)
