"""The comparison of one cell: what this rank has gathered and observed, and the reference that rank 0 computed alone.

The reference is the cell on one rank with the global batch, several times from the same state. What a cell with
`--compare` calls on the ranks is in the lines that the notebook adds to it.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import random
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn

from axon_nb.comm.world import World
from axon_nb.engine.elastic import sharded_states
from axon_nb.engine.parity import batch as batches
from axon_nb.engine.parity import recorder as recording
from axon_nb.engine.session import current
from axon_nb.errors import UsageError
from axon_nb.records.training import digests

_PLAIN, _OTHER_DRAWS, _PERTURBED = "plain", "other draws", "perturbed"
_SEED = 64_121
_BATCH_NORM = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
_NUM_PERTURBED = 2
_OF_PARAMETERS = ("start", "gradient", "weight")
EntryKey = tuple[str, str, int, int]
"""Kind, name, index and call of an observation."""
_TRIAL = "try"
"""The snapshot that `%%distributed --try` holds while the reference runs."""


class Reference:
    """Runs the cell on one rank, and compares what it computes with what the ranks observed.

    Args:
        seen: What each rank observed.
        places: The part of each rank.
        prepare: Restores the state from before the cell, gives this rank the whole model and batch, and returns the
            models and the tensors to perturb.
        body: The cell.
        cuts: From the tensors that `prepare` returned, and what perturbs others, makes what sees the cell's tensors.
    """

    def __init__(
        self,
        seen: Mapping[int, Sequence[digests.Observation]],
        places: Mapping[int, digests.Place],
        prepare: Callable[[], tuple[Mapping[str, nn.Module], list[torch.Tensor]]],
        body: Callable[[], None],
        cuts: Callable[[Sequence[torch.Tensor], Callable[[torch.Tensor], None]], batches.Cuts],
    ) -> None:
        self._places, self._prepare, self._body, self._cuts = places, prepare, body, cuts
        self._projector = recording.Projector()
        self._seen: dict[tuple[str, str, int], list[tuple[int, digests.Observation]]] = defaultdict(list)
        for rank, observations in seen.items():
            for one in observations:
                self._seen[one.kind, one.name, one.index].append((rank, one))
        spacings = {
            kind: max((one.epsilon for key, of in self._seen.items() if key[0] == kind for _, one in of), default=0.0)
            for kind in ("start", "output")
        }
        self._coarse = spacings["output"] if spacings["output"] > spacings["start"] else 0.0
        """Spacing of what ranks compute in fewer bits than the weights have, as under autocast; 0: nothing is."""
        self._digests: dict[str, dict[tuple[EntryKey, digests.Bounds], digests.Digest]] = defaultdict(dict)
        self._entries: dict[EntryKey, digests.Entry] = {}
        self._alone: dict[tuple[str, int, int], digests.Digest] = {}
        """What a BatchNorm computes from one rank's part of the batch, by name, call and rank."""
        self.unmatched: dict[str, None] = {}
        """Modules with shapes that do not fit."""
        self.random = ""
        """The first module whose values depend on random numbers."""

    def run(self) -> list[digests.Entry]:
        """Run the reference, and return what it computed beside what the ranks did."""
        self._run(_PLAIN)
        self._run(_OTHER_DRAWS)
        changed = self._first_changed(_OTHER_DRAWS)
        self.random = changed[1] or "the cell" if changed is not None else ""
        if not self.random:
            for number in range(_NUM_PERTURBED):
                self._run(f"{_PERTURBED} {number}")
        return list(self._entries.values())

    def _run(self, run: str) -> None:
        models, tensors = self._prepare()
        if run == _OTHER_DRAWS:
            _draw_others()
        elif run.startswith(_PERTURBED):
            perturb(tensors, seed=int(run[-1]))

        def change(tensor: torch.Tensor) -> None:
            if run.startswith(_PERTURBED):
                perturb([tensor], seed=int(run[-1]))

        numbers = itertools.count()

        def sink(kind: str, name: str, tensor: torch.Tensor, **facts: Any) -> torch.Tensor | None:
            self._take(run, kind, name, tensor, **facts)
            if not run.startswith(_PERTURBED) or kind not in ("output", "grad_output"):
                return None
            seen = self._seen.get((kind, name, facts.get("index", 0)), ())
            coarse = self._coarse and max((one.epsilon for _, one in seen), default=0.0)
            # Terms of a bias's gradient may cancel, such as those of balanced classes: weights do not show that. Nor
            # do weights show what autocast rounds.
            if coarse or (kind == "grad_output" and tensor.dtype == torch.float32):
                return tensor * _factors(tensor, next(numbers) if coarse else 0, int(run[-1]), coarse)
            return None

        def alone(_: World) -> None:
            with self._cuts(tensors, change) as cuts, recording.Recorder(models, sink, cuts=cuts) as recorder:
                try:
                    self._body()
                except batches.CellEnded:
                    steps = {1 + one.call for key, of in self._seen.items() if key[0] == "weight" for _, one in of}
                    if recorder.steps < max(steps, default=0):
                        raise UsageError(
                            "On one rank the cell's loop over the data has more rounds, so --compare cannot tell where "
                            "a step ends: make the batches or the loader in an earlier cell."
                        ) from None
                recorder.finish()

        World.mock(1).run(alone)

    @torch.no_grad()
    def _take(
        self, run: str, kind: str, path: str, tensor: torch.Tensor, *, index: int = 0, call: int = 0,
        module: nn.Module | None = None,
    ) -> None:  # fmt: skip
        whole = tuple(tensor.shape)
        of_batch = kind not in _OF_PARAMETERS
        matched = False
        for rank, one in self._seen.get((kind, path, index), ()):
            place = self._places[rank]
            count = recording.microbatches(one.shape, whole, place) if of_batch else 1
            if one.call // count != call:
                continue
            bounds = one.bounds or recording.part_of(one.shape, whole, place, of_batch=of_batch, call=one.call)
            if bounds is None or len(bounds) != len(whole):
                self.unmatched[path] = None
                continue
            matched = True
            key = (kind, path, index, one.call)
            part = tensor[tuple(slice(*bound) for bound in bounds)]
            if (key, bounds) not in self._digests[run]:
                self._digests[run][key, bounds] = self._projector.digest(part)
            self._note(run, key, bounds, rank, one, part=part, module=module)
        if not matched and (kind, path, index) in self._seen:
            self.unmatched[path] = None
        if kind == "gradient" and run.startswith(_PERTURBED):
            self._shift(tensor, path, call, up=run.endswith("0"))

    def _shift(self, gradient: torch.Tensor, path: str, call: int, *, up: bool) -> None:
        """Change a gradient, before the optimizer uses it, by as much as is allowed.

        Adam and Adagrad begin with steps of the same length for all elements, so a tiny one that changes its sign
        changes the weight a lot. What is 0 stays 0, such as the gradient of a word that does not occur.
        """
        entry = self._entries.get(("gradient", path, 0, call))
        if entry is None:
            return
        for bounds, rank in {part: rank for rank, part in entry.parts.items()}.items():
            part = gradient[tuple(slice(*bound) for bound in bounds)]
            size = digests.allowed_error(entry, rank) / max(1, part.numel()) ** 0.5
            part += (part != 0) * (size if up else -size)

    def _note(
        self, run: str, key: EntryKey, bounds: digests.Bounds, rank: int, one: digests.Observation, *,
        part: torch.Tensor, module: nn.Module | None,
    ) -> None:  # fmt: skip
        digest = self._digests[run][key, bounds]
        if run != _PLAIN:
            if key in self._entries and run.startswith(_PERTURBED):
                entry = self._entries[key]
                entry.noise[rank] = max(
                    entry.noise.get(rank, 0.0), digests.distance(digest.projections, entry.reference[rank].projections)
                )
            return
        rounded = self._coarse if key[0] == "gradient" else 0.0
        epsilon = max(recording.epsilon_of(part), one.epsilon, rounded)
        entry = self._entries.get(key) or digests.Entry(*key, type(module).__name__, epsilon, {}, {}, {}, {})
        self._entries[key] = entry
        entry.ranks[rank], entry.parts[rank], entry.reference[rank] = one.digest, bounds, digest
        kind, path, _, call = key
        if kind == "input" and isinstance(module, _BATCH_NORM) and module.training:
            alone = nn.functional.batch_norm(
                part, None, None, module.weight, module.bias, training=True, eps=module.eps
            )
            self._alone[path, call, rank] = self._projector.digest(alone)
        elif kind == "output" and (path, call, rank) in self._alone:
            entry.candidates.setdefault("batch norm", {})[rank] = self._alone[path, call, rank]
        elif kind == "output" and (bias := _bias_like(module, part, bounds)) is not None:
            entry.candidates.setdefault("bias", {})[rank] = self._projector.digest(bias)

    def _first_changed(self, run: str) -> EntryKey | None:
        for key, bounds in self._digests[_PLAIN]:
            if key[0] == "mask":
                continue
            other = self._digests[run].get((key, bounds))
            if other is None or other.projections != self._digests[_PLAIN][key, bounds].projections:
                return key
        return None


def _bias_like(module: nn.Module | None, part: torch.Tensor, bounds: digests.Bounds) -> torch.Tensor | None:
    """Return a module's bias in the shape of a part of its output."""
    bias = getattr(module, "bias", None)
    if isinstance(bias, torch.Tensor) and bias.ndim == 1 and part.ndim and len(bias) >= bounds[-1][1]:
        return bias[slice(*bounds[-1])].expand_as(part)
    return None


def _draw_others() -> None:
    """Seed the generators that augmentation uses with another number than before."""
    torch.manual_seed(_SEED)
    random.seed(_SEED)
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed(_SEED)


@torch.no_grad()
def perturb(tensors: Sequence[torch.Tensor], *, seed: int) -> None:
    """Change numbers by one unit in the last place, up or down at random."""
    for number, tensor in enumerate(tensors):
        if tensor.is_floating_point():
            tensor.mul_(_factors(tensor, number, seed))


@torch.no_grad()
def _factors(tensor: torch.Tensor, number: int, seed: int, coarse: float = 0.0) -> torch.Tensor:
    generator = torch.Generator(tensor.device).manual_seed(seed * 1_000_003 + number)
    signs = torch.randint(0, 2, tensor.shape, generator=generator, device=tensor.device) * 2 - 1
    return 1 + signs.to(tensor.dtype) * max(coarse, recording.epsilon_of(tensor))


class Comparer:
    """Compares one cell.

    Args:
        code: The cell, as Python.
        plain: Name of the plain model that stands for one that is split over ranks; empty: each rank has all of it.
        namespace: The variables of the rank.
    """

    def __init__(self, code: str, plain: str, namespace: dict[str, Any]) -> None:
        self._code, self._plain, self._namespace = code, plain, namespace
        self._names = batches.mentioned_names(current().kernel.shell.transform_cell(code), namespace)
        self._observations: list[digests.Observation] = []
        self._projector = recording.Projector()
        self._recorder: recording.Recorder | None = None
        self._written: list[str] = []
        self._writes = contextlib.ExitStack()
        self._seen: dict[int, list[digests.Observation]] = {}
        self._batch: batches.Batch
        self._parts: batches.Parts
        self._cuts: batches.Cuts
        self._joined: batches.Joined
        self._used: dict[batches.Key, None] = {}
        self._is_same_part = False
        self._settings = ""
        self._pieces: list[recording.Pieces] = []
        self._zero_states: list[dict[tuple[int, str], Any]] = []
        self.problem = self._prepare()
        """Why the cell cannot be compared; empty if it can. The same on all ranks."""

    def _prepare(self) -> str:
        problem = ""
        try:
            self._check()
        except UsageError as error:
            problem = str(error)
        if first := next(filter(None, batches.gather(problem)), ""):
            return str(first)
        try:
            self._batch = batches.gather_batch(self._namespace, self._names - set(self._models) - {self._plain})
        except UsageError as error:
            return str(error)
        if self._plain:
            (model,) = self._models.values()
            self._pieces = recording.gather_pieces(_part(model), self._optimizers())
        self._zero_states = recording.gather_zero_states(self._zero_optimizers())
        return ""

    def _check(self) -> None:
        self._models = self._find_models()
        if not self._models:
            raise UsageError(
                "--compare found no model: the cell must use a variable that is a torch.nn.Module with parameters, "
                "directly or in a function that it calls."
            )
        for optimizer in self._optimizers():
            if hasattr(optimizer, "optim") and not sharded_states.is_zero(optimizer):
                raise UsageError(f"--compare does not support {type(optimizer).__name__}, which splits its states.")
        for optimizer in self._zero_optimizers():
            if self._plain:
                raise UsageError("--compare supports ZeroRedundancyOptimizer only if each rank holds the whole model.")
            if sharded_states.zero_overlaps(optimizer):
                raise UsageError("--compare does not support ZeroRedundancyOptimizer with overlap_with_ddp=True.")
        if not self._plain:
            for name, model in self._models.items():
                if not recording.is_whole(model):
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
        return [optimizer for optimizer in self._optimizers() if sharded_states.is_zero(optimizer)]

    def begin(self) -> None:
        """Observe from now on."""
        models = {self._prefix(name): _part(model) for name, model in self._models.items()}
        data = self._names - set(self._models) - {self._plain}
        self._parts = batches.Parts([leaf for name in data for _, leaf in batches.leaves_of(self._namespace[name], ())])
        self._cuts = batches.Cuts(self._namespace, self._parts.note)
        self._recorder = recording.Recorder(models, self._observe, self._is_discarded, cuts=self._cuts).__enter__()
        self._writes.enter_context(recording.watched_writes(self._written))
        self._writes.enter_context(self._cuts)

    def _is_discarded(self) -> bool:
        return any(getattr(model, "infers_shapes", False) for model in self._models.values())

    def _prefix(self, name: str) -> str:
        return f"{name}." if len(self._models) > 1 else ""

    def _observe(self, kind: str, name: str, tensor: torch.Tensor, *, index: int = 0, call: int = 0, **_: Any) -> None:
        local, bounds = recording.local_part(tensor)
        digest = self._projector.digest(local)
        shape, epsilon = tuple(local.shape), recording.epsilon_of(local)
        self._observations.append(digests.Observation(kind, name, index, call, shape, digest, bounds, epsilon))

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
            self._joined = batches.gather_cuts(self._parts, self._cuts.calls, self._batch)
        except UsageError as error:
            self.problem = self.problem or str(error)
        # Stages of a pipeline may be trained in their own ways.
        used = {} if self._plain else {name: self._namespace.get(name) for name in sorted(self._names)}
        gathered = batches.gather_on_first((self._observations, self._written, recording.settings_of(used)))
        self._settings = recording.difference([settings for _, _, settings in gathered or ()])
        for rank, (observations, written, _) in enumerate(gathered or ()):
            self._seen[rank] = observations
            if written and not self.problem:
                self.problem = (
                    f"The cell writes {written[0]}, which the reference would write again: move that to another cell."
                )

    def compare(self) -> digests.Comparison:
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
        return digests.Comparison(
            fitting,
            places,
            batch,
            unmatched,
            reference.random,
            is_same_part=self._is_same_part,
            undropped=self._undropped(),
            settings=self._settings,
        )

    def _undropped(self) -> tuple[str, tuple[int, ...]]:
        """Return a dropout layer that drops on some of the ranks that call it, and the others."""
        called: dict[tuple[str, str], set[int]] = defaultdict(set)
        for rank, observations in self._seen.items():
            for one in observations:
                called[one.kind, one.name].add(rank)
        for (kind, name), ranks in called.items():
            if kind == "mask" and (others := called["output", name] - ranks):
                return name, tuple(sorted(others))
        return "", ()

    def _joined_names(self) -> Iterator[str]:
        yield from self._batch.names
        if any(key not in self._joined.equal for key in self._used):
            yield "the parts that the cell cuts on each rank"
        for line, name in dict.fromkeys(key[:2] for key in self._used if key in self._joined.equal):
            yield f"what `{name}` gets at line {line} (the same on all ranks)"

    def _replaced(
        self,
        whole: Mapping[batches.Key, torch.Tensor],
        tensors: Sequence[torch.Tensor],
        change: Callable[[torch.Tensor], None],
    ) -> batches.Cuts:
        """Return what joins, while the reference runs, the parts that the cell cuts itself."""

        def visit(key: batches.Key, part: torch.Tensor) -> torch.Tensor | None:
            if key not in whole:
                if key in self._joined.same and self._joined.same[key] != batches.checksum(part):
                    self._is_same_part = True
                return None
            self._used[key] = None
            tensor = whole[key].to(part.device, copy=True)
            change(tensor)
            return tensor

        def recut(key: batches.Key, part: torch.Tensor) -> torch.Tensor | None:
            other = self._joined.microbatches.get(key)
            if other is None or part.requires_grad or other.shape[1:] != part.shape[1:]:
                return None
            change(tensor := other.to(part.device, copy=True))
            return tensor

        return batches.Cuts(self._namespace, visit, tensors, self._joined.calls, recut)

    def _refused(self, problem: str) -> digests.Comparison:
        return digests.Comparison([], {}, (), (), "", problem)

    def _become_one(self) -> tuple[Mapping[str, nn.Module], list[torch.Tensor]]:
        """Give this rank the state before the cell, the whole batch and the whole model."""
        space = self._namespace
        current().snapshots.restore_held(_TRIAL)
        tensors: list[torch.Tensor] = []
        leaves = self._batch.leaves

        def joined(path: tuple[Any, ...], leaf: torch.Tensor) -> torch.Tensor:
            if path not in leaves:
                return leaf
            tensors.append(leaves[path].clone())
            return tensors[-1]

        for name in self._batch.names:
            space[name] = batches.replace_leaves(space[name], (name,), joined)
        for name, value in list(space.items()):
            if isinstance(value, dist.ProcessGroup):
                space[name] = None
        space["world_size"] = 1
        models = dict(self._models)
        if self._plain:
            models = self._become_plain()
        for optimizer, states in zip(self._zero_optimizers(), self._zero_states, strict=True):
            sharded_states.step_alone(optimizer, states)
        for model in models.values():
            recording.use_alone(model)
            tensors += [parameter.data for _, parameter in recording.named_parameters(model)]
        return {self._prefix(name): model for name, model in models.items()}, tensors

    def _become_plain(self) -> dict[str, nn.Module]:
        space, plain = self._namespace, self._namespace[self._plain]
        ((name, model),) = self._models.items()
        recording.fill(plain, self._pieces, self._batch.places)
        for optimizer in self._optimizers():
            recording.replace_optimizer(optimizer, _part(model), plain, pieces=self._pieces, places=self._batch.places)
        is_pipeline = _part(model) is not model
        substitute = (
            recording.WholePipeline(plain, next(iter(getattr(model, "_loss", (None,))))) if is_pipeline else plain
        )
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


def prepare(code: str, plain: str) -> str:
    """Gather what the reference needs, on all ranks; return why the cell cannot be compared, or an empty text."""
    session = current()
    shell = session.kernel.shell
    session.comparer = comparer = Comparer(code, plain, shell.user_ns)
    return comparer.problem


def begin() -> None:
    """Observe the cell on this rank, until it ends or fails."""
    session = current()
    comparer, events = _running(), session.kernel.shell.events

    def close(*_: object) -> None:
        events.unregister("post_run_cell", close)
        comparer.close()

    events.register("post_run_cell", close)
    comparer.begin()


def end() -> None:
    """Send what was observed to rank 0; collective over all ranks."""
    _running().end()


def compare() -> digests.Comparison:
    """Run the reference on this rank, which has observed nothing since `end`."""
    comparer = _running()
    try:
        return comparer.compare()
    finally:
        current().comparer = None


def _running() -> Comparer:
    comparer = current().comparer
    assert comparer is not None, "prepare() comes first"
    return comparer
