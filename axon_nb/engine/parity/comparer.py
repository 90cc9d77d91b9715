"""The comparison of one cell on this rank: what it has gathered, observed and, on rank 0, computed alone."""

from __future__ import annotations

import builtins
import contextlib
import functools
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn

from axon_nb.engine.elastic import zero
from axon_nb.engine.parity.batch import Batch, checksum, gather_batch, leaves_of, mentioned_names, replace_leaves
from axon_nb.engine.parity.cuts import Cuts, Joined, Key, Parts, gather_cuts
from axon_nb.engine.parity.digests import Projector, local_part
from axon_nb.engine.parity.recorder import Recorder, named_parameters
from axon_nb.engine.parity.reference import Reference
from axon_nb.engine.parity.whole import (
    Pieces,
    WholePipeline,
    fill,
    gather_pieces,
    gather_zero_states,
    is_whole,
    replace_optimizer,
    use_alone,
)
from axon_nb.engine.session import current
from axon_nb.engine.snapshot.history import History
from axon_nb.errors import UsageError
from axon_nb.records.training.comparison import Comparison, Observation

_TRIAL = "try"
"""The snapshot that `%%distributed --try` holds while the reference runs."""


class Comparer:
    """Compares one cell.

    Args:
        code: The cell, as Python.
        plain: Name of the plain model that stands for one that is split over ranks; empty: each rank has all of it.
        namespace: The variables of the rank.
    """

    def __init__(self, code: str, plain: str, namespace: dict[str, Any]) -> None:
        self._code, self._plain, self._namespace = code, plain, namespace
        self._names = mentioned_names(code, namespace)
        self._observations: list[Observation] = []
        self._projector = Projector()
        self._recorder: Recorder | None = None
        self._written: list[str] = []
        self._writes = contextlib.ExitStack()
        self._seen: dict[int, list[Observation]] = {}
        self._batch: Batch
        self._parts: Parts
        self._cuts: Cuts
        self._joined: Joined
        self._used: dict[Key, None] = {}
        self._is_same_part = False
        self._pieces: list[Pieces] = []
        self._zero_states: list[dict[tuple[int, str], Any]] = []
        self.problem = self._prepare()
        """Why the cell cannot be compared; empty if it can. The same on all ranks."""

    def _prepare(self) -> str:
        problem = ""
        try:
            self._check()
        except UsageError as error:
            problem = str(error)
        problems: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(problems, problem)
        if first := next(filter(None, problems), ""):
            return str(first)
        try:
            self._batch = gather_batch(self._namespace, self._names - set(self._models) - {self._plain})
        except UsageError as error:
            return str(error)
        if self._plain:
            (model,) = self._models.values()
            self._pieces = gather_pieces(_part(model), self._optimizers())
        self._zero_states = gather_zero_states(self._zero_optimizers())
        return ""

    def _check(self) -> None:
        self._models = self._find_models()
        if not self._models:
            raise UsageError(
                "--compare found no model: the cell must use a variable that is a torch.nn.Module with parameters, "
                "directly or in a function that it calls."
            )
        for optimizer in self._optimizers():
            if hasattr(optimizer, "optim") and not zero.is_zero(optimizer):
                raise UsageError(f"--compare does not support {type(optimizer).__name__}, which splits its states.")
        for optimizer in self._zero_optimizers():
            if self._plain:
                raise UsageError("--compare supports ZeroRedundancyOptimizer only if each rank holds the whole model.")
            if zero.overlaps(optimizer):
                raise UsageError("--compare does not support ZeroRedundancyOptimizer with overlap_with_ddp=True.")
        if not self._plain:
            for name, model in self._models.items():
                if not is_whole(model):
                    raise UsageError(
                        f"`{name}` is split over ranks: name a plain model with the same module names, such as "
                        "`%%distributed --compare plain`. It is filled with the ranks' weights."
                    )
            return
        plain = self._namespace.get(self._plain)
        if not isinstance(plain, nn.Module):
            raise UsageError(f"--compare {self._plain}: must be a variable of the ranks that holds the plain model.")
        if len(self._models) > 1:
            names = ", ".join(f"`{name}`" for name in self._models)
            raise UsageError(f"--compare {self._plain}: the cell uses several models ({names}); compare one at a time.")

    def _find_models(self) -> dict[str, nn.Module]:
        found: dict[str, nn.Module] = {}
        for name in sorted(self._names - {self._plain}):
            value = self._namespace[name]
            inside = vars(value).items() if hasattr(value, "__dict__") and not isinstance(value, nn.Module) else ()
            for key, one in ((name, value), *((f"{name}.{key}", one) for key, one in inside)):
                if isinstance(one, nn.Module) and (_part(one) is not one or any(True for _ in one.parameters())):
                    found.setdefault(key, one)
        held = {id(part) for model in found.values() for part in model.modules() if part is not model}
        return {name: model for name, model in found.items() if id(model) not in held}

    def _optimizers(self) -> list[torch.optim.Optimizer]:
        values = [self._namespace[name] for name in sorted(self._names)]
        return [value for value in values if isinstance(value, torch.optim.Optimizer)]

    def _zero_optimizers(self) -> list[torch.optim.Optimizer]:
        return [optimizer for optimizer in self._optimizers() if zero.is_zero(optimizer)]

    def begin(self) -> None:
        """Observe from now on."""
        models = {self._prefix(name): _part(model) for name, model in self._models.items()}
        data = self._names - set(self._models) - {self._plain}
        self._parts = Parts([leaf for name in data for _, leaf in leaves_of(self._namespace[name], ())])
        self._cuts = Cuts(self._namespace, self._parts.note)
        self._recorder = Recorder(models, self._observe, self._is_discarded, cuts=self._cuts).__enter__()
        self._writes.enter_context(_watched_writes(self._written))
        self._writes.enter_context(self._cuts)

    def _is_discarded(self) -> bool:
        return any(getattr(model, "infers_shapes", False) for model in self._models.values())

    def _prefix(self, name: str) -> str:
        return f"{name}." if len(self._models) > 1 else ""

    def _observe(self, kind: str, name: str, tensor: torch.Tensor, *, index: int = 0, call: int = 0, **_: Any) -> None:
        local, bounds = local_part(tensor)
        digest = self._projector.digest(local)
        self._observations.append(Observation(kind, name, index, call, tuple(local.shape), digest, bounds))

    def close(self) -> None:
        """Stop observing."""
        self._writes.close()
        if self._recorder is not None:
            self._recorder.__exit__()

    def end(self) -> None:
        """Stop observing, and send everything to rank 0; collective over all ranks."""
        if self._recorder is not None:
            self._recorder.finish()
        self.close()
        try:
            self._joined = gather_cuts(self._parts, self._cuts.calls, self._batch)
        except UsageError as error:
            self.problem = self.problem or str(error)
        gathered: list[Any] | None = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
        dist.gather_object((self._observations, self._written), gathered)
        for rank, (observations, written) in enumerate(gathered or ()):
            self._seen[rank] = observations
            if written and not self.problem:
                self.problem = (
                    f"The cell writes {written[0]}, which the reference would write again: move that to another cell."
                )

    def compare(self) -> Comparison:
        """Run the reference on this rank, and return what differs; the state is then that of the reference."""
        if self.problem:
            return self._refused(self.problem)
        # On the ranks, a line that begins the comparison comes first.
        lines = current().kernel.shell.transform_cell(f"pass\n{self._code}")
        code = compile(lines, "<the cell on one rank>", "exec")
        places = self._batch.places
        joined = self._joined
        wholes = [joined.whole, joined.whole | joined.equal] if joined.equal else [joined.whole]
        for whole in wholes:
            self._used.clear()
            cuts = functools.partial(self._replaced, whole)
            reference = Reference(self._seen, places, self._become_one, lambda: exec(code, self._namespace), cuts)
            try:
                entries = reference.run()
                break
            except UsageError as error:
                return self._refused(str(error))
            except Exception as error:
                if whole is not wholes[-1]:
                    continue  # parts with equal values, such as labels, may be parts of the batch nevertheless
                names = ", ".join(self._joined_names()) or "nothing: no variable of the cell differs between ranks"
                return self._refused(
                    f"The cell fails on one rank with the global batch (joined: {names}; what is the same on all ranks "
                    f"is not a part): {type(error).__name__}: {error}"
                )
        fitting = [entry for entry in entries if len(entry.ranks)]
        if not any(entry.kind == "output" for entry in fitting) and len(places) > 1:
            return self._refused(
                "No module computed what fits the reference: take the batch in an earlier cell, as in "
                "`x, y = next(iter(loader))`, so that its parts can be joined."
            )
        batch, unmatched = tuple(self._joined_names()), tuple(reference.unmatched)
        return Comparison(fitting, places, batch, unmatched, reference.random, is_same_part=self._is_same_part)

    def _joined_names(self) -> Iterator[str]:
        yield from self._batch.names
        if any(key not in self._joined.equal for key in self._used):
            yield "the parts that the cell cuts on each rank"
        for line, name in dict.fromkeys(key[:2] for key in self._used if key in self._joined.equal):
            yield f"what `{name}` gets at line {line} (the same on all ranks)"

    def _replaced(
        self, whole: Mapping[Key, torch.Tensor], tensors: Sequence[torch.Tensor], change: Callable[[torch.Tensor], None]
    ) -> Cuts:
        """Return what joins, while the reference runs, the parts that the cell cuts itself."""

        def visit(key: Key, part: torch.Tensor) -> torch.Tensor | None:
            if key not in whole:
                if key in self._joined.same and self._joined.same[key] != checksum(part):
                    self._is_same_part = True
                return None
            self._used[key] = None
            tensor = whole[key].to(part.device, copy=True)
            change(tensor)
            return tensor

        return Cuts(self._namespace, visit, tensors, self._joined.calls)

    def _refused(self, problem: str) -> Comparison:
        return Comparison([], {}, (), (), "", problem)

    def _become_one(self) -> tuple[Mapping[str, nn.Module], list[torch.Tensor]]:
        """Give this rank the state before the cell, the whole batch and the whole model."""
        space = self._namespace
        cast(History, current().snapshots).restore_held(_TRIAL)
        tensors: list[torch.Tensor] = []
        leaves = self._batch.leaves

        def joined(path: tuple[Any, ...], leaf: torch.Tensor) -> torch.Tensor:
            if path not in leaves:
                return leaf
            tensors.append(leaves[path].clone())
            return tensors[-1]

        for name in self._batch.names:
            space[name] = replace_leaves(space[name], (name,), joined)
        for name, value in list(space.items()):
            if isinstance(value, dist.ProcessGroup):
                space[name] = None
        space["world_size"] = 1
        models = dict(self._models)
        if self._plain:
            models = self._become_plain()
        for optimizer, states in zip(self._zero_optimizers(), self._zero_states, strict=True):
            zero.step_alone(optimizer, states)
        for model in models.values():
            use_alone(model)
            tensors += [parameter.data for _, parameter in named_parameters(model)]
        return {self._prefix(name): model for name, model in models.items()}, tensors

    def _become_plain(self) -> dict[str, nn.Module]:
        space, plain = self._namespace, self._namespace[self._plain]
        ((name, model),) = self._models.items()
        fill(plain, self._pieces, self._batch.places)
        for optimizer in self._optimizers():
            replace_optimizer(optimizer, _part(model), plain, pieces=self._pieces, places=self._batch.places)
        is_pipeline = _part(model) is not model
        substitute = WholePipeline(plain, next(iter(getattr(model, "_loss", (None,))))) if is_pipeline else plain
        for other, value in list(space.items()):
            if value is model:
                space[other] = substitute
        owner, dot, key = name.partition(".")
        if dot:
            setattr(space[owner], key, substitute)
        return {name: plain}


def _part(model: nn.Module) -> nn.Module:
    """Return this rank's part of a pipeline; any other model as it is."""
    return cast(nn.Module, model.module) if hasattr(model, "stage_indices") else model


@contextlib.contextmanager
def _watched_writes(written: list[str]) -> Iterator[None]:
    """Note the files that Python or torch.save, whose C++ code opens its own, open to write."""
    real_open, real_save = builtins.open, torch.save

    def watched_open(file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        if set(mode) & set("wax+") and isinstance(file, str | os.PathLike):
            path = os.fspath(file)
            if not str(path).startswith(("/dev/", "/proc/")):
                written.append(str(path))
        return real_open(file, mode, *args, **kwargs)

    def watched_save(obj: Any, f: Any, *args: Any, **kwargs: Any) -> Any:
        if not hasattr(f, "write"):
            written.append(str(f))
        return real_save(obj, f, *args, **kwargs)

    builtins.open, torch.save = cast(Any, watched_open), cast(Any, watched_save)
    try:
        yield
    finally:
        builtins.open, torch.save = real_open, real_save
