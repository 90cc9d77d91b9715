"""The reference: the cell on one rank with the global batch, several times from the same state."""

from __future__ import annotations

import random
import sys
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from axon_nb.comm.world import World
from axon_nb.engine.parity.cuts import CellEnded, Cuts
from axon_nb.engine.parity.digests import Projector, epsilon_of, microbatches, part_of
from axon_nb.engine.parity.recorder import Recorder
from axon_nb.errors import UsageError
from axon_nb.records.training.comparison import Bounds, Digest, Entry, Observation, Place, allowed_error

_PLAIN, _OTHER_DRAWS, _PERTURBED = "plain", "other draws", "perturbed"
_SEED = 64_121
_BATCH_NORM = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
_NUM_PERTURBED = 2
_OF_PARAMETERS = ("start", "gradient", "weight")

Key = tuple[str, str, int, int]
"""Kind, name, index and call of an observation."""


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
        seen: Mapping[int, Sequence[Observation]],
        places: Mapping[int, Place],
        prepare: Callable[[], tuple[Mapping[str, nn.Module], list[torch.Tensor]]],
        body: Callable[[], None],
        cuts: Callable[[Sequence[torch.Tensor], Callable[[torch.Tensor], None]], Cuts],
    ) -> None:
        self._places, self._prepare, self._body, self._cuts = places, prepare, body, cuts
        self._projector = Projector()
        self._seen: dict[tuple[str, str, int], list[tuple[int, Observation]]] = defaultdict(list)
        for rank, observations in seen.items():
            for one in observations:
                self._seen[one.kind, one.name, one.index].append((rank, one))
        self._digests: dict[str, dict[tuple[Key, Bounds], Digest]] = defaultdict(dict)
        self._entries: dict[Key, Entry] = {}
        self._alone: dict[tuple[str, int, int], Digest] = {}
        """What a BatchNorm computes from one rank's part of the batch, by name, call and rank."""
        self.unmatched: dict[str, None] = {}
        """Modules with shapes that do not fit."""
        self.random = ""
        """The first module whose values depend on random numbers."""

    def run(self) -> list[Entry]:
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

        def sink(kind: str, name: str, tensor: torch.Tensor, **facts: Any) -> torch.Tensor | None:
            self._take(run, kind, name, tensor, **facts)
            if kind != "grad_output" or not run.startswith(_PERTURBED) or tensor.dtype != torch.float32:
                return None
            # Terms of a bias's gradient may cancel, such as those of balanced classes: weights do not show that.
            perturb([changed := tensor.clone()], seed=int(run[-1]))
            return changed

        def alone(_: World) -> None:
            with self._cuts(tensors, change) as cuts, Recorder(models, sink, cuts=cuts) as recorder:
                try:
                    self._body()
                except CellEnded:
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
            count = microbatches(one.shape, whole, place) if of_batch else 1
            if one.call // count != call:
                continue
            bounds = one.bounds or part_of(one.shape, whole, place, of_batch=of_batch, call=one.call)
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
            size = allowed_error(entry, rank) / max(1, part.numel()) ** 0.5
            part += (part != 0) * (size if up else -size)

    def _note(
        self, run: str, key: Key, bounds: Bounds, rank: int, one: Observation, *, part: torch.Tensor,
        module: nn.Module | None,
    ) -> None:  # fmt: skip
        digest = self._digests[run][key, bounds]
        if run != _PLAIN:
            if key in self._entries and run.startswith(_PERTURBED):
                entry = self._entries[key]
                entry.noise[rank] = max(entry.noise.get(rank, 0.0), _distance(digest, entry.reference[rank]))
            return
        entry = self._entries.get(key) or Entry(*key, type(module).__name__, epsilon_of(part), {}, {}, {}, {})
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

    def _first_changed(self, run: str) -> Key | None:
        for key, bounds in self._digests[_PLAIN]:
            if key[0] == "mask":
                continue
            other = self._digests[run].get((key, bounds))
            if other is None or other.projections != self._digests[_PLAIN][key, bounds].projections:
                return key
        return None


def _distance(one: Digest, other: Digest) -> float:
    """Estimate the norm of the difference of two tensors."""
    pairs = zip(one.projections, other.projections, strict=True)
    return float((sum((a - b) ** 2 for a, b in pairs) / len(one.projections)) ** 0.5)


def _bias_like(module: nn.Module | None, part: torch.Tensor, bounds: Bounds) -> torch.Tensor | None:
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
            generator = torch.Generator(tensor.device).manual_seed(seed * 1_000_003 + number)
            signs = torch.randint(0, 2, tensor.shape, generator=generator, device=tensor.device) * 2 - 1
            tensor.mul_(1 + signs.to(tensor.dtype) * epsilon_of(tensor))
