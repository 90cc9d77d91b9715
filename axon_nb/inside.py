"""Look inside a model that is split over ranks: record what modules take and give, whole, and change it.

These functions work on the ranks of a cell, under torchrun, and in one process. All ranks that share the model call
them alike. A place is the name of a module, or a pattern of names, and what is meant of it:

    with inside.record(model, "layers.*.mlp", "layers.*.self_attn:heads") as seen:
        model(tokens)
    seen["layers.0.mlp"][0]          # of the first call: (batch, positions, features), whole

A pattern matches the end of a name, and ``*`` one part of it: ``layers.*.mlp`` is ``model.layers.0.mlp``, too.
``:output`` is what a module returns, the first tensor of several; ``:input`` what it is called with; ``:heads`` what
the heads of an attention give to its output projection, as (batch, positions, heads, head size); ``:attention`` its
maps, as (batch, heads, positions, positions), where the model returns them.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from fnmatch import fnmatchcase
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from msgspec import Struct, field
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from axon_nb.errors import UsageError
from axon_nb.parallel.tensor.layouts import Known, Layout, head_size, layout_of
from axon_nb.records.ranks import name_ranks
from axon_nb.records.units import exact_bytes, format_bytes

__all__ = ["Recording", "add", "lens", "record", "replace"]

Value = torch.Tensor | float | Callable[[torch.Tensor], torch.Tensor | None]
_SLOTS = ("output", "input", "heads", "attention")
_PROJECTIONS = ("o_proj", "out_proj", "out", "c_proj", "dense", "wo")
"""Names of an attention's output projection."""
_HEADS = ("lm_head", "head", "output", "embed_out")
"""Names of the layer that gives logits, where the model does not tell it."""
_FINAL_NORMS = ("norm", "ln_f", "final_layer_norm", "final_layernorm", "norm_f")
_WRAPPERS = frozenset({"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"})
_ELSEWHERE = "PipelineIdentityLayer"
"""Class of transformers that stands for a module which another stage of a pipeline has."""
_LIMIT = 1 << 30
_taps: WeakKeyDictionary[nn.Module, _Tap] = WeakKeyDictionary()
"""The hooks of contexts that are entered now, by module."""
_REPORTED_FROM = 16 << 20
"""Bytes from which on a recording says that it moves them."""


class _Place(NamedTuple):
    """A slot of a module in a model."""

    name: str
    """As users name it: of the module, with the slot unless that is the output."""
    module: nn.Module
    parent: nn.Module | None
    slot: str
    heads: int | None = None
    """Size of a head, if the last dimension is to be shown as heads."""


class _Tap:
    """The hooks of this file on a module: they change its values, in the order of the contexts, then record them."""

    def __init__(self, module: nn.Module) -> None:
        self.changes: list[Callable[..., Any]] = []
        self.records: list[Callable[..., Any]] = []
        # The last to see the input, and the first to see the output: between, torch's styles convert them.
        self._handles = (
            module.register_forward_pre_hook(self._before, with_kwargs=True),
            module.register_forward_hook(self._after, prepend=True),
        )

    def remove_if_unused(self, module: nn.Module) -> None:
        if not self.changes and not self.records:
            for handle in self._handles:
                handle.remove()
            _taps.pop(module, None)

    def _before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        found = (args, kwargs)
        for act in (*self.changes, *self.records):
            found = act("input", found)
        return found

    def _after(self, module: nn.Module, args: Any, output: Any) -> Any:
        for act in (*self.changes, *self.records):
            output = act("output", output)
        return output


@contextmanager
def _attached(actions: Sequence[tuple[_Place, Callable[..., Any], bool]]) -> Iterator[None]:
    # Compiled code does not see hooks that come after it.
    with torch.compiler.set_stance("force_eager"):
        yield from _hooked(actions)


def _hooked(actions: Sequence[tuple[_Place, Callable[..., Any], bool]]) -> Iterator[None]:
    taps = []
    for place, act, changes in actions:
        tap = _taps.get(place.module) or _taps.setdefault(place.module, _Tap(place.module))
        (tap.changes if changes else tap.records).append(act)
        taps.append((place.module, tap, tap.changes if changes else tap.records, act))
    try:
        yield
    finally:
        for module, tap, acts, act in taps:
            acts.remove(act)
            tap.remove_if_unused(module)


def _tensor_in(place: _Place, side: str, found: Any) -> tuple[torch.Tensor, Callable[[torch.Tensor], Any]] | None:
    """Return the tensor that a place means, and a function that puts another in its place; None: not this side."""
    if side != ("input" if place.slot == "input" else "output"):
        return None
    if side == "input":
        args, kwargs = found
        if (key := _first(enumerate(args))) is not None:
            return args[key], lambda new: ((*args[:key], new, *args[key + 1 :]), kwargs)
        if (key := _first(kwargs.items())) is not None:
            return kwargs[key], lambda new: (args, {**kwargs, key: new})
        raise UsageError(f"{place.name} is called without a tensor; record its output.")
    if place.slot == "attention":
        if isinstance(found, tuple) and len(found) > 1 and isinstance(found[1], torch.Tensor):
            return found[1], lambda new: (found[0], new, *found[2:])
        name = place.name.removesuffix(":attention")
        raise UsageError(f'{name} returns no attention maps; make the model with attn_implementation="eager".')
    if isinstance(found, torch.Tensor):
        return found, lambda new: new
    if isinstance(found, Mapping) and (key := _first(found.items())) is not None:
        return found[key], lambda new: type(found)(**{**found, key: new})  # transformers' outputs keep their class
    if isinstance(found, tuple | list) and (key := _first(enumerate(found))) is not None:
        return found[key], lambda new: type(found)((*found[:key], new, *found[key + 1 :]))
    raise UsageError(f"{place.name} returns no tensor but a {type(found).__name__}; record a module inside of it.")


def _first(items: Iterable[tuple[Any, Any]]) -> Any:
    return next((key for key, value in items if isinstance(value, torch.Tensor)), None)


class _Reader:
    """Reads the values of a place, call by call."""

    def __init__(self, model: nn.Module, place: _Place) -> None:
        self.place = place
        self._known = Known.before(model, place.parent)

    def layout(self, value: torch.Tensor) -> Layout:
        return layout_of(self.place.module, self.place.parent, self.place.slot, value, self._known)

    def split_over(self, layout: Layout) -> tuple[tuple[int, ...], str]:
        """Return the ranks among which a value is split, and what of it."""
        if layout.mesh is None or not layout.is_split:
            return (), ""
        dims = {kind.dim % len(layout.shape) for kind in layout.placements if hasattr(kind, "dim")}
        is_last, is_map = dims == {len(layout.shape) - 1}, self.place.slot == "attention"
        what = "heads" if is_map or (is_last and self.place.heads) else "features" if is_last else "positions"
        return tuple(layout.mesh.mesh.flatten().tolist()), what if dims else "a sum"

    def shown(self, whole: torch.Tensor) -> torch.Tensor:
        """Return the whole value in the shape that users see."""
        return whole if self.place.heads is None else whole.unflatten(-1, (-1, self.place.heads))


class Recording(Mapping[str, tuple[torch.Tensor, ...]]):
    """What modules took and gave: by the name of a place, a tensor for each call. Complete when the context has ended.

    A name may lack its beginning, if one place alone is meant: ``seen["layers.0.mlp"]``. `gradients` has the gradients,
    if they were asked for, likewise: they are there if a backward ran inside the context.
    """

    def __init__(self, names: Sequence[str], elsewhere: Mapping[str, Sequence[int]] | None = None) -> None:
        self._elsewhere = dict(elsewhere or {})
        self._names = (*names, *self._elsewhere)
        self._values: dict[str, list[torch.Tensor]] = {}
        self.gradients: Mapping[str, tuple[torch.Tensor, ...]] = {}
        self.where = "its context has not ended, or failed"
        """The ranks that have the values, if not all; or why there are none."""
        self.tokens: tuple[torch.Tensor, ...] = ()
        """What the model's embedding was called with, call by call."""
        self.lens: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
        """What `lens` has found: by place, tokens and their shares."""
        self.words: dict[int, str] = {}
        """Words of tokens, once `lens` had a tokenizer."""
        self.computed: dict[str, tuple[tuple[int, ...], str]] = {}
        """By place, the ranks that share the work and what they split, such as ``heads``; no ranks: each has it all."""

    def __getitem__(self, name: str) -> tuple[torch.Tensor, ...]:
        """Return the values of a place, one for each call."""
        wanted = name.removesuffix(":output")
        found = [each for each in self._names if each == wanted] or [
            each for each in self._names if each.endswith(f".{wanted}")
        ]
        if len(found) != 1:
            near = found or difflib.get_close_matches(wanted, self._names, n=3, cutoff=0.3) or self._names[:3]
            raise UsageError(f"{name!r} must be one recorded place; recorded were {', '.join(near)}.")
        if ranks := self._elsewhere.get(found[0]):
            raise UsageError(f"{found[0]} has no values here: it runs on {name_ranks(ranks)}.")
        if found[0] not in self._values:
            raise UsageError(
                f"{found[0]} has no values here: {self.where or 'the module was not called in the context'}."
            )
        return tuple(self._values[found[0]])

    def get(self, name: str, default: Any = None) -> Any:
        """Return the values of a place, or `default` if it has none here."""
        try:
            return self[name]
        except UsageError:
            return default

    def __contains__(self, name: object) -> bool:
        """Whether a place, named as for `seen[name]`, has values on this rank."""
        return bool(self.get(str(name)))

    def __iter__(self) -> Iterator[str]:
        """Iterate over the names of the places that have values on this rank, in the order of their first calls."""
        return iter(self._values)

    def __len__(self) -> int:
        """Return the number of places that have values on this rank."""
        return len(self._values)

    def _note_tokens(self, side: str, found: Any) -> Any:
        if side == "input":
            self.tokens += tuple(value.detach().cpu() for value in found[0][:1] if isinstance(value, torch.Tensor))
        return found

    @property
    def nbytes(self) -> int:
        """Bytes of all values on this rank."""
        return sum(value.nbytes for values in self._values.values() for value in values)

    def __repr__(self) -> str:
        """Return one line."""
        return f"<Recording of {len(self)} places, {format_bytes(self.nbytes)}{f'; {self.where}' * bool(self.where)}>"


class _Recorder(Struct):
    """Keeps this rank's parts while the model runs, and joins them afterwards."""

    names: Sequence[str]
    to: int | None
    limit: int
    dtype: torch.dtype | None
    device: torch.device
    gradients: bool
    parts: list[tuple[_Reader, Layout, torch.Tensor]] = field(default_factory=list)
    gradient_parts: dict[int, torch.Tensor] = field(default_factory=dict)
    total: int = 0
    """Bytes of the whole tensors."""
    split: int = 0
    """Bytes of those that must be joined."""

    def action(self, model: nn.Module, place: _Place) -> Callable[..., Any]:
        reader = _Reader(model, place)

        def act(side: str, found: Any) -> Any:
            if (tensor := _tensor_in(place, side, found)) is not None:
                self._keep(reader, tensor[0])
            return found

        return act

    def _keep(self, reader: _Reader, value: torch.Tensor) -> None:
        layout = reader.layout(value)
        dtype = self.dtype if self.dtype is not None and value.is_floating_point() else value.dtype
        size = torch.Size(layout.shape).numel() * dtype.itemsize * (1 + self.gradients)
        self.total += size
        self.split += size * layout.is_split
        if self.total > self.limit:
            once = self.total / (len(self.parts) + 1) * len(self.names)
            less = "pass dtype=torch.bfloat16, " if dtype.itemsize > 2 else ""
            raise UsageError(
                f"recording {len(self.names)} places takes about {exact_bytes(once)} for each call of the model, "
                f"{exact_bytes(self.total)} so far, and limit= is {exact_bytes(self.limit)}; record fewer places or a "
                f"shorter text, {less}or raise limit=."
            )
        if self.gradients and value.requires_grad:
            number = len(self.parts)
            value.register_hook(lambda gradient: self.gradient_parts.__setitem__(number, self._copy(gradient, dtype)))
        self.parts.append((reader, layout, self._copy(value, dtype)))

    def _copy(self, value: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        # A DTensor stays one, with its placements; a copy, as the model may change the value in place.
        device = value.device if isinstance(value, DTensor) else self.device
        return value.detach().to(dtype=dtype, device=device, copy=True)

    def finish(self, seen: Recording) -> None:
        """Join what was kept, one tensor at a time."""
        here = self.to is None or not dist.is_initialized() or dist.get_rank() == self.to
        seen.where = "" if here else f"they are on rank {self.to}"
        if self.split >= _REPORTED_FROM and (not dist.is_initialized() or dist.get_rank() == (self.to or 0)):
            where = "on all ranks" if self.to is None else f"on rank {self.to}"
            print(f"inside.record: joins {format_bytes(self.split)} of {format_bytes(self.total)} {where}", flush=True)
        gradients: dict[str, list[torch.Tensor]] = {}
        for number, (reader, layout, part) in enumerate(self.parts):
            for value, kept in ((part, seen._values), (self.gradient_parts.pop(number, None), gradients)):
                if value is None:
                    continue
                whole = self._joined(layout, value)
                seen.computed[reader.place.name] = reader.split_over(layout)
                if here:
                    kept.setdefault(reader.place.name, []).append(reader.shown(whole))
        self.parts.clear()
        recorded = Recording(seen._names, seen._elsewhere)
        recorded._values, recorded.where = gradients, seen.where or "no backward reached it in the context"
        seen.gradients = recorded

    def _joined(self, layout: Layout, part: torch.Tensor) -> torch.Tensor:
        if layout.is_split and not isinstance(part, DTensor):
            assert layout.mesh is not None
            part = part.to(layout.mesh.device_type)
        with torch.no_grad():
            return layout.join(part).to(self.device)


@contextmanager
def record(
    model: nn.Module,
    *places: str,
    to: int | None = None,
    limit: int = _LIMIT,
    dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu",
    gradients: bool = False,
) -> Iterator[Recording]:
    """Record inputs and outputs of modules, whole. Collective at the end of the context, if the model is split.

    While the model runs, each rank keeps its parts; they are joined when the context ends without an error, one tensor
    at a time.

    Args:
        model: The model, on each rank that shares it.
        *places: Names of modules or patterns, and which value of them; see the module's description.
        to: The rank that gets the values; None: all ranks.
        limit: Bytes of whole tensors that may be recorded.
        dtype: Floating-point values are kept as this; None: as they are.
        device: Where they are kept.
        gradients: Whether to keep the gradients of the values, too; this takes twice the memory.

    Yields:
        The recording; it is empty until the context ends.

    Raises:
        UsageError: no module has the name, `to` or `dtype` is none, or the recording takes more than `limit`.
    """
    if to is not None and dist.is_initialized() and to not in range(dist.get_world_size()):
        raise UsageError(f"to={to!r} must be a rank, 0 to {dist.get_world_size() - 1}, or None for all.")
    if dtype is not None and not getattr(dtype, "is_floating_point", False):
        raise UsageError(f"dtype={dtype!r} must be a floating-point dtype, such as torch.bfloat16.")
    found, elsewhere = _find(model, places)
    recorder = _Recorder([place.name for place in found], to, limit, dtype, torch.device(device), gradients)
    seen = Recording([place.name for place in found], elsewhere)
    actions = [(place, recorder.action(model, place), False) for place in found]
    if (
        embedding := next((module for module in model.modules() if isinstance(module, nn.Embedding)), None)
    ) is not None:
        actions.append((_Place("the embedding", embedding, None, "input"), seen._note_tokens, False))
    with _attached(actions):
        yield seen
    recorder.finish(seen)


@contextmanager
def replace(model: nn.Module, values: Mapping[str, Value]) -> Iterator[None]:
    """Replace inputs and outputs of modules while the context lasts: ablation, or patching from another prompt.

    Args:
        model: The model, on each rank that shares it.
        values: By place, as for `record`: a number; a tensor of the whole value's shape, or that broadcasts to it; or
            a function that gets the whole value, and changes it or returns another. All ranks pass the same. Gradients
            reach the tensors, and what the function uses, in full on each rank.

    Raises:
        UsageError: no module has the name, or a tensor does not fit the value.
    """
    with _attached([(place, _change(model, place, value, False), True) for place, value in _each(model, values)]):
        yield


@contextmanager
def add(model: nn.Module, values: Mapping[str, torch.Tensor | float]) -> Iterator[None]:
    """Add to inputs and outputs of modules while the context lasts, such as a steering vector.

    Args:
        model: The model, on each rank that shares it.
        values: By place, as for `record`: a number, or a tensor that broadcasts to the whole value; the same on all
            ranks. Gradients reach it in full on each rank.

    Raises:
        UsageError: no module has the name, or a tensor does not fit the value.
    """
    with _attached([(place, _change(model, place, value, True), True) for place, value in _each(model, values)]):
        yield


def lens(model: nn.Module, seen: Recording, tokenizer: Any = None) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Read what blocks return as the model's last norm and its head would: the logit lens. Collective.

    Args:
        model: The model, on each rank that shares it.
        seen: A recording of blocks, such as ``layers.*``, on all ranks.
        tokenizer: Gives the words that `%inside` shows: a tokenizer with `decode`, or a function of a token.

    Returns:
        By place, the most likely token after each position and its share, as (batch, positions); of several calls, one
        behind another. `seen` keeps them, too.

    Raises:
        UsageError: the recording is not on all ranks, has no block or batches of several sizes; or the model's last
            norm and head are not known.
    """
    if seen.where:
        raise UsageError(f"lens needs the values on all ranks: {seen.where}.")
    if any(type(module).__name__ == _ELSEWHERE for module in model.modules()):
        raise UsageError("lens needs the last norm and the head beside all blocks; stages of a pipeline have either.")
    owners = (getattr(model, "base_model", model), model)
    norm = next((found for each in owners for name in _FINAL_NORMS if (found := getattr(each, name, None))), None)
    head = getattr(model, "get_output_embeddings", lambda: None)()
    head = head or next((found for name in _HEADS if (found := getattr(model, name, None))), None)
    if not isinstance(norm, nn.Module) or not isinstance(head, nn.Module):
        raise UsageError(
            f"{type(model).__name__} is not known to have a last norm ({', '.join(_FINAL_NORMS)}) and a head "
            f"({', '.join(_HEADS)}); call yours on the recorded values."
        )
    blocks = [name for name in seen if name.rpartition(".")[2].lstrip("abcdefghijklmnopqrstuvwxyz_").isdigit()]
    if not blocks:
        raise UsageError("lens reads what blocks return, and none was recorded; record a pattern such as 'layers.*'.")
    weight = next(norm.parameters(), next(head.parameters()))
    known = Known()
    sharded = [module for module in dict.fromkeys((model, norm, head)) if isinstance(module, FSDPModule)]
    for module in sharded:
        module.unshard()
    with torch.no_grad():
        for name in blocks:
            if len(batches := {len(value) for value in seen[name]}) > 1:
                raise UsageError(f"lens needs calls of one batch size; {name} has {sorted(batches)}.")
            hidden = torch.cat([value.to(weight.device, weight.dtype) for value in seen[name]], 1)
            logits = head(norm(hidden))
            shares = layout_of(head, None, "output", logits, known).join(logits).float().softmax(-1).max(-1)
            seen.lens[name] = (shares.indices.cpu(), shares.values.cpu())
    for module in sharded:
        module.reshard()
    if tokenizer is not None:
        decode = getattr(tokenizer, "decode", None)
        found = {int(token) for tokens, _ in seen.lens.values() for token in tokens.flatten()}
        found.update(int(token) for tokens in seen.tokens for token in tokens.flatten())
        seen.words = {token: str(decode([token]) if decode else tokenizer(token)) for token in sorted(found)}
    return seen.lens


def _each(model: nn.Module, values: Mapping[str, Any]) -> Iterator[tuple[_Place, Any]]:
    for pattern, value in values.items():
        for place in _find(model, (pattern,))[0]:
            yield place, value


def _change(model: nn.Module, place: _Place, value: Value, adds: bool) -> Callable[..., Any]:
    reader = _Reader(model, place)

    def act(side: str, found: Any) -> Any:
        if (tensor := _tensor_in(place, side, found)) is None:
            return found
        old, put = tensor
        layout = reader.layout(old)
        if callable(value) and not isinstance(value, torch.Tensor):
            whole = reader.shown(layout.join(old)).clone()
            given = value(whole)
            new = _fitted(place, whole if given is None else given, whole.shape, old)
        else:
            shape = torch.Size(layout.shape)
            new = _fitted(place, value, reader.shown(torch.empty(shape, device="meta")).shape, old)
        part = layout.split(new.reshape(layout.shape), like=old)
        return put(old + part if adds else part)

    return act


def _fitted(place: _Place, value: Any, shape: torch.Size, like: torch.Tensor) -> torch.Tensor:
    try:
        tensor = torch.as_tensor(value).to(device=like.device, dtype=like.dtype)
    except (RuntimeError, TypeError):
        raise UsageError(f"{place.name}: a value is a number or a tensor; got {value!r}.") from None
    try:
        return tensor.expand(shape)
    except RuntimeError:
        raise UsageError(
            f"{place.name} has shape {tuple(shape)} in this call; got a value of shape {tuple(tensor.shape)}."
        ) from None


def _find(model: nn.Module, patterns: Sequence[str]) -> tuple[list[_Place], dict[str, list[int]]]:
    """Return the places that patterns mean, in the order of the model's modules, and those of other ranks' stages."""
    modules = dict(model.named_modules(remove_duplicate=False))
    own = (name for name, module in modules.items() if type(module).__name__ != _ELSEWHERE)
    names = {name: plain for name in own if (plain := _plain(name))}
    others = _owners(names.values()) if any(type(each).__name__ == _ELSEWHERE for each in modules.values()) else {}
    found: dict[str, _Place] = {}
    elsewhere: dict[str, list[int]] = {}
    for pattern in patterns:
        if not isinstance(pattern, str):
            raise UsageError(f"a place is the name of a module, or a pattern of names; got {pattern!r}.")
        path, colon, slot = pattern.partition(":")
        if colon and slot not in _SLOTS:
            raise UsageError(f"{pattern!r}: {slot!r} must be {', '.join(_SLOTS[:-1])} or {_SLOTS[-1]}.")
        wanted = path.split(".")
        matches = [name for name, plain in names.items() if _matches(plain, wanted)]
        missing = {name: ranks for name, ranks in others.items() if _matches(name.split("."), wanted)}
        elsewhere.update({f"{name}:{slot}" if slot else name: ranks for name, ranks in missing.items()})
        if not matches and not missing:
            near = difflib.get_close_matches(path, [".".join(plain) for plain in names.values()], n=3)
            near = near or sorted({plain[-1] for plain in names.values()}, key=lambda name: (name.isdigit(), name))[:8]
            raise UsageError(
                f"no module of this rank is named {path!r}; there are {', '.join(near)}. A stage of a pipeline has "
                "its own modules only."
            )
        once: dict[nn.Module, str] = {}
        for name in matches:  # a module that the model holds twice is one place
            once.setdefault(modules[name], name)
        for name in once.values():
            parent = modules[name.rpartition(".")[0]]
            place = _place(".".join(names[name]), modules[name], parent, slot or "output")
            found[place.name] = place
    return list(found.values()), elsewhere


def _owners(own: Iterable[Sequence[str]]) -> dict[str, list[int]]:
    """Return the ranks of modules that this rank lacks. Collective."""
    names = {".".join(plain) for plain in own}
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, sorted(names))
    found: dict[str, list[int]] = {}
    for rank, theirs in enumerate(gathered):
        for name in theirs:
            if name not in names:
                found.setdefault(name, []).append(rank)
    return found


def _plain(name: str) -> list[str]:
    parts = [part for part in name.split(".") if part and part not in _WRAPPERS]
    return parts[1:] if parts[:1] == ["module"] and len(parts) > 1 else parts  # of DDP


def _matches(plain: Sequence[str], wanted: Sequence[str]) -> bool:
    return len(wanted) <= len(plain) and all(
        fnmatchcase(part, pattern) for part, pattern in zip(plain[-len(wanted) :], wanted, strict=True)
    )


def _place(name: str, module: nn.Module, parent: nn.Module, slot: str) -> _Place:
    if slot != "heads":
        return _Place(name if slot == "output" else f"{name}:{slot}", module, parent, slot)
    projection: Any = next(filter(None, (getattr(module, name, None) for name in _PROJECTIONS)), None)
    features = getattr(projection, "in_features", None)
    size = head_size(module, features) if features else None
    if size is None:
        raise UsageError(
            f"{name} is not known as an attention: it needs a linear layer named {', '.join(_PROJECTIONS[:-1])} or "
            f"{_PROJECTIONS[-1]}, and the number or size of its heads; use ':input' of its last linear layer."
        )
    return _Place(f"{name}:heads", projection, module, "input", size)
