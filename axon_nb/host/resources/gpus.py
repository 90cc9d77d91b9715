"""The GPUs of this host that this process may use.

`nvidia-smi` lists them: a process that has initialised CUDA cannot be forked, so neither the notebook nor the agent
asks torch.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from axon_nb.records.environment import VISIBLE_GPUS

_BUSY_BYTES = 512 << 20
_QUERY = "index,uuid,name,memory.total,memory.used"
_MIG = "MIG-"
NODES = (Path("/dev/nvidiactl"), Path("/dev/dxg"))
"""Device files of NVIDIA's driver, on Linux and in WSL."""
NVML = (sys.executable, "-P", "-m", "axon_nb.host.resources.nvml")
"""Prints what `nvidia-smi` prints with the same arguments; a process of its own, because a broken driver may hang."""
_LISTED = re.compile(r"(?:GPU \d+|\s+MIG (?P<profile>\S+) .*): .*\(UUID: (?P<uuid>(?:GPU|MIG)-[^)]+)\)\s*")
"""A line of `nvidia-smi -L`: a card, or one of the MIG instances of the card above it."""
_BY_PARENT = re.compile(r"MIG-(?P<card>GPU-[^/]+)/\d+/\d+")
"""An instance as drivers before R470 list it; newer ones still accept it: card, GPU instance, compute instance."""


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU of this host."""

    index: int
    """The driver's index, as used in `CUDA_VISIBLE_DEVICES`."""
    name: str
    total_bytes: int
    used_bytes: int
    mig: str = ""
    """The MIG instance to use, as named in `CUDA_VISIBLE_DEVICES`; empty: the whole card.

    The memory of an instance is unknown: 0 bytes.
    """
    uuid: str = ""
    """Of the card."""

    @property
    def selector(self) -> str:
        """Its name in `CUDA_VISIBLE_DEVICES`."""
        return self.mig or str(self.index)

    @property
    def key(self) -> str:
        """Its name in reservations, which no other GPU has."""
        return self.mig or self.uuid

    @property
    def busy(self) -> bool:
        """Whether more than half a GiB of its memory is in use."""
        return self.used_bytes > _BUSY_BYTES


def list_gpus(nodes: Sequence[Path] = NODES) -> list[Gpu]:
    """Return the GPUs that `CUDA_VISIBLE_DEVICES` names, in its order, and the instances of those that are cut (MIG).

    Args:
        nodes: Files that exist where there is a driver.
    """
    query = (f"--query-gpu={_QUERY}", "--format=csv,noheader,nounits")
    cards = dict(card for line in _ask(*query, nodes=nodes) if (card := _parse(line)))
    instances = mig_instances(_ask("-L", nodes=nodes)) if cards else {}
    visible = os.environ.get(VISIBLE_GPUS.name)
    gpus = list(cards.values()) if visible is None else visible_gpus(visible, cards, instances)
    return [part for gpu in gpus for part in _parts(gpu, cards, instances)]


def _parts(gpu: Gpu, cards: Mapping[str, Gpu], instances: Mapping[str, tuple[str, str]]) -> list[Gpu]:
    names = [name for name, (card, _) in instances.items() if cards.get(card) == gpu]
    return [part for name in names for part in _instance(name, cards, instances)] or [gpu]


def unlisted_gpus(nodes: Sequence[Path] = NODES) -> list[str]:
    """Return the device files of a driver whose GPUs `list_gpus` misses; none if the user has hidden them.

    Args:
        nodes: Files that exist where there is a driver.
    """
    if os.environ.get(VISIBLE_GPUS.name) is not None or list_gpus(nodes):
        return []
    return [str(node) for node in nodes if node.exists()]


def visible_gpus(visible: str, cards: Mapping[str, Gpu], instances: Mapping[str, tuple[str, str]]) -> list[Gpu]:
    """Return the GPUs that a value of `CUDA_VISIBLE_DEVICES` names, in its order, as CUDA reads it.

    An entry is a number, the UUID of a card or its beginning, or a MIG instance. The first unknown entry ends the list.
    If a card is named twice, or an entry is ambiguous, no GPU is visible. A process would see only the first of several
    instances, but each rank has a value for itself.

    Args:
        visible: The value.
        cards: All cards by UUID.
        instances: Result of `mig_instances`.
    """
    gpus: list[Gpu] = []
    for item in (entry.strip() for entry in visible.split(",")):
        if item.startswith(_MIG):
            matching = _instance(item, cards, instances)
        else:
            matching = [gpu for uuid, gpu in cards.items() if item and item in (str(gpu.index), uuid[: len(item)])]
        if not matching:
            break
        if len(matching) > 1 or matching[0] in gpus:
            return []
        gpus.append(matching[0])
    return gpus


def mig_instances(lines: Sequence[str]) -> dict[str, tuple[str, str]]:
    """Return the MIG instances listed by `nvidia-smi -L`: UUID of the card and profile (``3g.20gb``), by name."""
    instances: dict[str, tuple[str, str]] = {}
    card = ""
    for match in filter(None, map(_LISTED.fullmatch, lines)):
        if match["profile"] is None:
            card = match["uuid"]
        else:
            instances[match["uuid"]] = card, match["profile"]
    return instances


def _instance(name: str, cards: Mapping[str, Gpu], instances: Mapping[str, tuple[str, str]]) -> list[Gpu]:
    parent, profile = instances.get(name, ("", ""))
    if not parent and (match := _BY_PARENT.fullmatch(name)):
        # A newer driver lists UUIDs of instances, which hide their numbers: it suffices that there are any.
        listed = [other for other, (card, _) in instances.items() if card == match["card"]]
        parent = match["card"] if listed and not any(map(_BY_PARENT.fullmatch, listed)) else ""
    if parent not in cards:
        return []
    card = cards[parent]
    return [Gpu(card.index, f"{card.name} MIG {profile}".rstrip(), 0, 0, mig=name, uuid=card.uuid)]


def _parse(line: str) -> tuple[str, Gpu] | None:
    fields = line.split(", ")
    if len(fields) < 5 or not fields[0].isdigit():
        return None
    total, used = (int(text) << 20 if text.isdigit() else 0 for text in fields[-2:])
    return fields[1], Gpu(int(fields[0]), ", ".join(fields[2:-2]), total, used, uuid=fields[1])


def _ask(*arguments: str, nodes: Sequence[Path]) -> list[str]:
    """Run `nvidia-smi`, or NVML where that is missing or fails, as in some containers; return the lines printed."""
    program = shutil.which("nvidia-smi")
    commands = [[program]] if program else []
    commands += [[*NVML]] if any(node.exists() for node in nodes) else []
    for command in commands:
        try:
            done = subprocess.run([*command, *arguments], capture_output=True, text=True, timeout=30, check=False)
        except (OSError, subprocess.TimeoutExpired):
            continue
        if done.returncode == 0 and done.stdout:
            return done.stdout.splitlines()
    return []
