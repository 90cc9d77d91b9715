"""What `%inside` shows of a recording: norms, attention maps, and words of a logit lens."""

from __future__ import annotations

from itertools import accumulate

import torch
from msgspec.structs import replace

from axon_nb.engine.session import current, user_variables
from axon_nb.inside import Recording
from axon_nb.records.protocol.inspection import NOT_COMPUTED, RecordedPlace, RecordingFacts

_MAX_PLACES, _MAX_POSITIONS, _MAX_MAPS = 128, 64, 96
_NUM_DIMS = 3
"""Of what is drawn: batch, positions and the rest."""


def recording_facts(name: str, known: int = 0) -> RecordingFacts:
    """Describe a recording; only its key if that is the known one."""
    variables = user_variables(current().kernel.shell)
    if name not in variables:
        return RecordingFacts(refused="does not exist")
    seen = variables[name]
    if not isinstance(seen, Recording):
        return RecordingFacts(refused=f"(type {type(seen).__name__}) is not a recording of axon_nb.inside")
    if not seen:
        return RecordingFacts(refused=f"has no values: {seen.where or 'no place was called'}")
    key = hash((id(seen), len(seen.lens), len(seen.words)))
    if key == known:
        return RecordingFacts(key=key)
    rows = [tokens[0].flatten().tolist() for tokens in seen.tokens]
    words = [seen.words.get(token, str(token)) for row in rows for token in row]
    shown, maps = list(seen)[:_MAX_PLACES], 0
    places, omitted = [], []
    for place in shown:
        described = _describe(seen, place, _MAX_MAPS - maps)
        maps += described.map_shape[0] if described.map_shape else 0
        places.append(described)
    positions = max(max(len(place.norms), place.shape[-1] if place.map_shape else 0) for place in places)
    if len(seen) > len(shown):
        omitted.append(f"{len(seen) - len(shown)} more places are left out.")
    if positions > _MAX_POSITIONS:
        omitted.append(f"Positions from {_MAX_POSITIONS} on are left out, of {positions}.")
    if any(place.endswith(":attention") and not found.map_shape for place, found in zip(shown, places, strict=True)):
        omitted.append(f"Attention maps after the first {maps} are left out: record fewer layers.")
    ends = accumulate(map(len, rows))
    # A text that is generated token by token is one.
    starts = tuple(end for end, row, after in zip(ends, rows, rows[1:], strict=False) if max(len(row), len(after)) > 1)
    return RecordingFacts(
        key=key, words=tuple(words[:_MAX_POSITIONS]), starts=starts, places=tuple(map(_cut, places)),
        omitted=tuple(omitted),
    )  # fmt: skip


def _describe(seen: Recording, name: str, room: int) -> RecordedPlace:
    values = seen[name]
    ranks, split = seen.computed.get(name, ((), ""))
    maps, norms = b"", list[float]()
    map_shape: tuple[int, ...] = ()
    if name.endswith(":attention"):
        drawn = values[0][0, :, :_MAX_POSITIONS, :_MAX_POSITIONS].float()
        if drawn.shape[0] <= room:
            maps, map_shape = (drawn.clamp(0, 1) * 255).to(torch.uint8).numpy(force=True).tobytes(), tuple(drawn.shape)
    elif values[0].ndim >= _NUM_DIMS:
        lengths = [tokens.shape[-1] for tokens in seen.tokens]
        for value, length in zip(values, lengths if len(lengths) == len(values) else [0] * len(values), strict=True):
            each = value[0].float().flatten(1).norm(dim=1).tolist()
            norms += [NOT_COMPUTED] * (length - len(each)) + each  # `generate` wants logits of the last alone
    tokens, shares = seen.lens.get(name, (None, None))
    lens = []
    if tokens is not None and shares is not None:
        pairs = zip(tokens[0].tolist(), shares[0].tolist(), strict=True)
        lens = [(seen.words.get(token, str(token)), share) for token, share in pairs]
    return RecordedPlace(
        name, tuple(values[0].shape), len(values), ranks, split, tuple(norms), maps, map_shape, tuple(lens)
    )


def _cut(place: RecordedPlace) -> RecordedPlace:
    return replace(place, norms=place.norms[:_MAX_POSITIONS], lens=place.lens[:_MAX_POSITIONS])
