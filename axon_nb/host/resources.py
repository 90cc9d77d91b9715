"""What this process may use: cores, memory and GPUs.

Limits of cgroups count at every level, from the process's own to the top.

`nvidia-smi` lists GPUs: a process that has initialised CUDA cannot be forked, so neither the notebook nor the agent
asks torch. A child process asks the driver, which may hang.

Reserved GPUs are locked files in a folder that all users share, so that two clusters do not take the same card. The
agent of a cluster holds the locks. They are POSIX record locks: the system releases them when the agent ends, however
it does, and the ranks that it forks do not inherit them. Each user has files of their own, one per card, which others
can only read: nobody can write into them, hold their locks or follow a link out of the folder.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import math
import os
import pwd
import re
import selectors
import shutil
import stat
import struct
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from msgspec import Struct

from axon_nb.host.children import read_number
from axon_nb.records.environment import RUNTIME_DIR, VISIBLE_GPUS
from axon_nb.records.protocol.agent import ReserveGpus, TakenGpus
from axon_nb.records.protocol.wire import ProtocolError, decode
from axon_nb.records.telemetry import GpuReport

CGROUPS = Path("/sys/fs/cgroup")
"""Where cgroups are mounted."""
OWN_CGROUP = Path("/proc/self/cgroup")
"""Lists the cgroups of this process, one line per hierarchy."""
_AVAILABLE = re.compile(r"^MemAvailable:\s*(\d+) kB$", re.MULTILINE)
_MACHINE = Path("/proc/meminfo")
_FILES = {1: ("memory.limit_in_bytes", "memory.usage_in_bytes"), 2: ("memory.max", "memory.current")}
_CACHE = {
    1: re.compile(r"^total_inactive_file (\d+)$", re.MULTILINE),
    2: re.compile(r"^inactive_file (\d+)$", re.MULTILINE),
}
"""Files and fields by cgroup version."""
_UNLIMITED = 1 << 60
"""Without a limit, version 1 reports the largest number of whole pages."""
_BUSY_BYTES = 512 << 20
_QUERY = "index,uuid,name,memory.total,memory.used"
_MIG = "MIG-"
NODES = (Path("/dev/nvidiactl"), Path("/dev/dxg"))
"""Device files of NVIDIA's driver, on Linux and in WSL."""
NVML = (sys.executable, "-P", "-m", "axon_nb.host.nvml")
"""Prints what `nvidia-smi` prints with the same arguments; a process of its own, because a broken driver may hang."""
_LISTED = re.compile(r"(?:GPU \d+|\s+MIG (?P<profile>\S+) .*): .*\(UUID: (?P<uuid>(?:GPU|MIG)-[^)]+)\)\s*")
"""A line of `nvidia-smi -L`: a card, or one of the MIG instances of the card above it."""
_BY_PARENT = re.compile(r"MIG-(?P<card>GPU-[^/]+)/\d+/\d+")
"""An instance as drivers before R470 list it; newer ones still accept it: card, GPU instance, compute instance."""
_FLOCK = struct.Struct("hhqqi")
"""`struct flock` of Linux: type, whence, start, length, pid."""
_MAX_NAME = 256
_FOLDER_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
# A file of another user may be a link, or a pipe that nobody writes to.
_FILE_FLAGS = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


def cgroup_folders(controller: str, *, root: Path = CGROUPS, own: Path = OWN_CGROUP) -> list[tuple[Path, int]]:
    """Return the folders of this process's cgroup and its ancestors, lowest first, each with its version (1 or 2).

    In a container the listed path is often the host's, which is not mounted: such folders do not exist, and the topmost
    one is the container's own.

    Args:
        controller: Name, such as ``cpu`` or ``memory``.
        root: Where cgroups are mounted.
        own: A file like /proc/self/cgroup.
    """
    try:
        lines = own.read_text().splitlines()
    except OSError:
        lines = ["0::/"]
    found: list[tuple[Path, int]] = []
    for _, names, path in (line.split(":", 2) for line in lines if line.count(":") >= 2):
        if names == "":
            base, version = root, 2
        elif controller in names.split(","):
            mounts = [root / names, root / controller]  # "cpu,cpuacct", often with a link to it called "cpu"
            base, version = next((mount for mount in mounts if mount.is_dir()), root / controller), 1
        else:
            continue
        below = Path(path.lstrip("/"))
        if ".." in below.parts:  # the process was moved out of the container's namespace
            below = Path()
        found += [(base / part, version) for part in dict.fromkeys((below, *below.parents))]
    return found


def usable_cores(root: Path = CGROUPS, own: Path = OWN_CGROUP) -> int:
    """Return the number of usable cores: the CPU affinity, limited by the lowest cgroup quota; at least 1.

    Args:
        root: Where cgroups are mounted: v2 with `cpu.max`, v1 with `cpu.cfs_quota_us`.
        own: A file like /proc/self/cgroup.
    """
    try:
        cores = len(os.sched_getaffinity(0))
    except AttributeError:
        cores = os.cpu_count() or 1
    quotas = [_quota(folder, version) for folder, version in cgroup_folders("cpu", root=root, own=own)]
    return max(1, min([cores, *(math.ceil(quota) for quota in quotas if quota is not None)]))


def _quota(folder: Path, version: int) -> float | None:
    """Return the number of CPUs that the processes of a cgroup may use; None: no limit."""
    try:
        if version == 2:
            limit, period = (folder / "cpu.max").read_text().split()
        else:
            limit, period = ((folder / f"cpu.cfs_{name}_us").read_text() for name in ("quota", "period"))
        return int(limit) / int(period) if int(limit) > 0 else None
    except (OSError, ValueError, ZeroDivisionError):  # "max" is not a number
        return None


def free_memory(root: Path = CGROUPS, own: Path = OWN_CGROUP, meminfo: Path = _MACHINE) -> int | None:
    """Return the bytes that are free or can be freed at once, on the machine and in all cgroups; None: unknown.

    Args:
        root: Where cgroups are mounted.
        own: A file like /proc/self/cgroup.
        meminfo: A file like /proc/meminfo.
    """
    of_groups = [_of_cgroup(folder, version) for folder, version in cgroup_folders("memory", root=root, own=own)]
    kibibytes = read_number(meminfo, _AVAILABLE)
    of_machine = None if kibibytes is None else kibibytes << 10
    return min((value for value in (of_machine, *of_groups) if value is not None), default=None)


def _of_cgroup(folder: Path, version: int) -> int | None:
    try:
        limit, used = (int((folder / name).read_text()) for name in _FILES[version])
    except (OSError, ValueError):  # "max" is not a number
        return None
    cached = read_number(folder / "memory.stat", _CACHE[version]) or 0  # the kernel can drop it at once
    return max(0, limit - used + cached) if limit < _UNLIMITED else None


def container_kind() -> str:
    """Return ``kubernetes``, ``docker``, ``podman`` or ``apptainer``; empty: no known container."""
    if os.environ.get("KUBERNETES_SERVICE_HOST"):
        return "kubernetes"
    if os.environ.get("APPTAINER_CONTAINER") or os.environ.get("SINGULARITY_CONTAINER"):
        return "apptainer"
    if Path("/run/.containerenv").exists():
        return "podman"
    return "docker" if Path("/.dockerenv").exists() else ""


class Gpu(Struct, frozen=True):
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


def read_gpus(selector: selectors.BaseSelector, on_report: Callable[[GpuReport], None]) -> None:
    """Ask the driver; the event loop of `selector` calls `on_report` with what it says."""

    def on_end(output: bytes) -> None:
        report = GpuReport((), "The driver does not reply.")
        with contextlib.suppress(ProtocolError, ValueError):  # it hung or died
            report = decode(GpuReport, json.loads(output))
        on_report(report)

    ProgramOutput(selector, [*NVML, "--report"], on_end)


class ProgramOutput:
    """A program that the event loop starts and whose output it collects; it must end by itself.

    Args:
        selector: The event loop's.
        arguments: The command line.
        on_end: Called with the output when the program has closed it.
    """

    def __init__(
        self, selector: selectors.BaseSelector, arguments: Sequence[str], on_end: Callable[[bytes], None]
    ) -> None:
        self._selector = selector
        self._on_end = on_end
        self._output = bytearray()
        self._pipe, end = os.pipe()
        try:
            # The event loop reaps it with its other children.
            subprocess.Popen(arguments, stdin=subprocess.DEVNULL, stdout=end, stderr=subprocess.DEVNULL)
        finally:
            os.close(end)
        selector.register(self._pipe, selectors.EVENT_READ, self.on_ready)

    def on_ready(self, mask: int) -> None:
        """Read what is there; called by the event loop."""
        if data := os.read(self._pipe, 1 << 16):
            self._output += data
            return
        self._selector.unregister(self._pipe)
        os.close(self._pipe)
        self._on_end(bytes(self._output))


class GpuOwner(Struct, frozen=True):
    """The cluster that has reserved a GPU."""

    name: str
    user: str
    """Empty: this process's own user."""
    pid: int
    """Its agent; 0 if that is in another container."""

    def __str__(self) -> str:
        if not self.user:
            return repr(self.name)
        return f"{self.name!r} of the user {self.user}{f', process {self.pid}' if self.pid else ''}"


@contextlib.contextmanager
def _folder() -> Iterator[int]:
    """Open the folder of the locks; create it where all users can add files, and only a file's owner removes it.

    Raises:
        OSError: it cannot be created, or is not a folder.
    """
    # Not the temporary folder, which may be a user's own.
    path = Path(RUNTIME_DIR.get() or "/tmp") / "axon_nb-gpus"
    with contextlib.suppress(FileExistsError):
        path.mkdir()
        path.chmod(0o1777)
    folder = os.open(path, _FOLDER_FLAGS)
    try:
        yield folder
    finally:
        os.close(folder)


def _name(gpu: str, uid: int | str) -> str:
    return f"{gpu.replace('/', '_')}.{uid}"


def gpu_owners(gpus: Iterable[str]) -> dict[str, GpuOwner]:
    """Return the clusters of all users that have reserved GPUs, by GPU; those that nobody has are left out.

    Not for GPUs that this process has reserved: to look releases its lock.

    Args:
        gpus: UUIDs of cards, or names of MIG instances.
    """
    return _owners(wanted, others_only=False) if (wanted := list(gpus)) else {}


def _owners(gpus: Iterable[str], *, others_only: bool) -> dict[str, GpuOwner]:
    owners: dict[str, GpuOwner] = {}
    with contextlib.suppress(OSError), _folder() as folder:
        files = os.listdir(folder)
        for gpu in gpus:
            for file in files:
                uid = file.rpartition(".")[2]
                if file == _name(gpu, uid) and not (others_only and uid == f"{os.getuid()}"):
                    with contextlib.suppress(OSError):
                        if owner := _owner(folder, file, uid):
                            owners.setdefault(gpu, owner)
    return owners


def _owner(folder: int, file: str, uid: str) -> GpuOwner | None:
    with open(os.open(file, os.O_RDONLY | _FILE_FLAGS, dir_fd=folder), "rb") as opened:
        info = os.fstat(opened.fileno())
        if not stat.S_ISREG(info.st_mode) or f"{info.st_uid}" != uid:
            return None
        wanted = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
        kind, _, _, _, pid = _FLOCK.unpack(fcntl.fcntl(opened, fcntl.F_GETLK, wanted))
        if kind == fcntl.F_UNLCK:
            return None
        name = opened.read(_MAX_NAME).decode(errors="replace")
    return GpuOwner(name, "" if info.st_uid == os.getuid() else _user(info.st_uid), max(0, pid))


def _user(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return f"{uid}"


class GpuLocks:
    """The GPUs that the cluster of this process has reserved."""

    def __init__(self) -> None:
        self._files: dict[str, int] = {}

    def reserve(self, _: object, request: ReserveGpus) -> TakenGpus:
        """Reserve GPUs for this cluster; return those that other clusters have.

        If two users reserve the same one at the same moment, neither may get it, and never both.

        Args:
            _: Who asks.
            request: Which GPUs, and the cluster's name.
        """
        taken: dict[str, GpuOwner] = {}
        for gpu in request.gpus:
            if gpu in self._files:  # closing a second descriptor of the file would release the lock
                continue
            try:
                file = _open_own(gpu)
            except OSError:  # a full disk must not keep a cluster from starting
                continue
            try:
                fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                os.close(file)
                taken |= gpu_owners([gpu])
                continue
            if others := _owners([gpu], others_only=True):
                os.close(file)
                taken |= others
                continue
            self._files[gpu] = file
            with contextlib.suppress(OSError):
                os.ftruncate(file, 0)
                os.pwrite(file, request.owner.encode()[:_MAX_NAME], 0)
        return TakenGpus({gpu: str(owner) for gpu, owner in taken.items()})


def _open_own(gpu: str) -> int:
    with _folder() as folder:
        file = os.open(_name(gpu, os.getuid()), os.O_RDWR | os.O_CREAT | _FILE_FLAGS, 0o600, dir_fd=folder)
        try:
            info = os.fstat(file)
            if not stat.S_ISREG(info.st_mode) or info.st_uid != os.getuid():
                raise PermissionError(f"{gpu}: the lock file is not this user's own")
            os.fchmod(file, 0o644)  # other users read the cluster's name
        except OSError:
            os.close(file)
            raise
    return file
