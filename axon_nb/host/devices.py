"""Available GPUs according to `nvidia-smi`: CUDA itself must not be initialised here.

A process that has initialised CUDA cannot be forked, so neither the notebook nor the agent asks torch.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from axon_nb.records.environment import VISIBLE_GPUS

__all__ = ["Gpu", "choose", "instances_of", "list_gpus"]

_BUSY_BYTES = 512 << 20
_QUERY = "index,uuid,name,memory.total,memory.used"
_MIG = "MIG-"
_LISTED = re.compile(r"(?:GPU \d+|\s+MIG (?P<profile>\S+) .*): .*\(UUID: (?P<uuid>(?:GPU|MIG)-[^)]+)\)\s*")
"""A line of `nvidia-smi -L`: a card, or one of the MIG instances of the card above it."""
_BY_PARENT = re.compile(r"MIG-(?P<card>GPU-[^/]+)/\d+/\d+")
"""An instance as drivers before R470 list it and newer ones still take it: card, GPU instance, compute instance."""


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU of this host."""

    index: int
    """The driver's index, as used in `CUDA_VISIBLE_DEVICES`."""
    name: str
    total_bytes: int
    used_bytes: int
    mig: str = ""
    """The one MIG instance of it that may be used, as `CUDA_VISIBLE_DEVICES` names it; empty: the whole card.

    Memory of an instance is not known: 0 bytes.
    """

    @property
    def selector(self) -> str:
        """What `CUDA_VISIBLE_DEVICES` takes for it."""
        return self.mig or str(self.index)

    @property
    def busy(self) -> bool:
        """Whether more than half a GiB of its memory is in use."""
        return self.used_bytes > _BUSY_BYTES


def list_gpus() -> list[Gpu]:
    """The GPUs that `CUDA_VISIBLE_DEVICES` leaves visible, in its order; empty where there is no driver."""
    cards = dict(
        card for line in _ask(f"--query-gpu={_QUERY}", "--format=csv,noheader,nounits") if (card := _parse(line))
    )
    visible = os.environ.get(VISIBLE_GPUS.name)
    if visible is None:
        return list(cards.values())
    return choose(visible, cards, instances_of(_ask("-L")) if _MIG in visible else {})


def choose(visible: str, cards: Mapping[str, Gpu], instances: Mapping[str, tuple[str, str]]) -> list[Gpu]:
    """The GPUs that a value of `CUDA_VISIBLE_DEVICES` shows, in its order.

    As CUDA does: an entry is a number, the UUID of a card or its beginning, or a MIG instance. The first that names
    nothing ends the list; a card named twice, or a name that fits two, shows none at all. A process sees one instance
    only, and no card beside it.

    Args:
        visible: The value.
        cards: All cards by UUID.
        instances: What `instances_of` found.
    """
    chosen: list[Gpu] = []
    for item in (entry.strip() for entry in visible.split(",")):
        if item.startswith(_MIG):
            matching = _instance(item, cards, instances)
        else:
            matching = [gpu for uuid, gpu in cards.items() if item and item in (str(gpu.index), uuid[: len(item)])]
        if not matching:
            break
        if len(matching) > 1 or matching[0] in chosen:
            return []
        if chosen and (matching[0].mig or chosen[0].mig):
            break
        chosen.append(matching[0])
    return chosen


def instances_of(lines: Sequence[str]) -> dict[str, tuple[str, str]]:
    """The MIG instances that `nvidia-smi -L` lists: UUID of the card and profile such as ``3g.20gb``, by name."""
    found: dict[str, tuple[str, str]] = {}
    card = ""
    for match in filter(None, map(_LISTED.fullmatch, lines)):
        if match["profile"] is None:
            card = match["uuid"]
        else:
            found[match["uuid"]] = card, match["profile"]
    return found


def _instance(name: str, cards: Mapping[str, Gpu], instances: Mapping[str, tuple[str, str]]) -> list[Gpu]:
    parent, profile = instances.get(name, ("", ""))
    if not parent and (match := _BY_PARENT.fullmatch(name)):
        # A newer driver lists UUIDs of instances, from which their numbers cannot be told: that there are any suffices.
        listed = [other for other, (card, _) in instances.items() if card == match["card"]]
        parent = match["card"] if listed and not any(map(_BY_PARENT.fullmatch, listed)) else ""
    if parent not in cards:
        return []
    card = cards[parent]
    return [Gpu(card.index, f"{card.name} MIG {profile}".rstrip(), 0, 0, mig=name)]


def _parse(line: str) -> tuple[str, Gpu] | None:
    fields = line.split(", ")
    if len(fields) < 5 or not fields[0].isdigit():
        return None
    total, used = (int(text) << 20 if text.isdigit() else 0 for text in fields[-2:])
    return fields[1], Gpu(int(fields[0]), ", ".join(fields[2:-2]), total, used)


def _ask(*arguments: str) -> list[str]:
    """The lines that `nvidia-smi` prints; none where it fails."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return []
    try:
        done = subprocess.run([program, *arguments], capture_output=True, text=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return []
    return done.stdout.splitlines() if done.returncode == 0 else []
