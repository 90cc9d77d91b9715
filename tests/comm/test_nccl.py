"""NCCL without a GPU: what is missing is reported; replacements try its messages and clocks. With a GPU: tests/gpu."""

from __future__ import annotations

import ctypes
import queue
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from axon_nb.comm import Backend, NcclError, World, nccl
from axon_nb.comm.group import choose_backend
from axon_nb.comm.nccl import Messages, NcclBackend, NcclGroup, NcclUniqueId, join_world
from axon_nb.comm.spans import DeviceClock
from axon_nb.comm.torch_group import register_group
from axon_nb.engine.groups.flight_recorder import FinishedCalls
from axon_nb.engine.inspection.views import SpanReader
from axon_nb.engine.session import RankSession
from axon_nb.records.protocol.recovery import JoinConfig
from axon_nb.records.spans import Span, SpanRing, ring
from tests.engine.groups.native_ranks import run_on_ranks
from tests.engine.groups.test_flight_recorder import dump_of, entry
from tests.support.fake_device import install
from tests.support.ranks import DeviceWorld

ID = NcclUniqueId(b"\x00\x01" * 64)
USES: list[Callable[[], object]] = [
    nccl.nccl_version,
    nccl.devices,
    NcclBackend.generate_unique_id,
    lambda: NcclBackend.create_world([0, 1]),
    lambda: NcclBackend(ID, 0, 1, 0),
]

SIZE = 3

_MS = 1_000_000


@pytest.mark.skipif(torch.cuda.is_available(), reason="tests behaviour without a GPU")
@pytest.mark.parametrize("use", USES)
def test_without_nccl_every_use_reports_the_reason(use: Callable[[], object]) -> None:
    assert not nccl.is_available()
    with pytest.raises(
        NcclError, match=r"NCCL is unavailable: (torch .* without NCCL|no CUDA device).*use Backend\.GLOO"
    ):
        use()


def test_unique_id_round_trips_as_text() -> None:
    assert NcclUniqueId.from_text(ID.to_text()) == ID
    with pytest.raises(NcclError, match="is not a unique id"):
        NcclUniqueId.from_text("not base64!")


def test_ranks_sharing_gpus_use_gloo() -> None:
    count = torch.cuda.device_count() if nccl.is_available() else 0
    assert choose_backend(count + 1) is Backend.GLOO
    assert count == 0 or choose_backend(count) is Backend.NCCL


def test_ranks_of_a_device_world_create_tensors_on_it() -> None:
    def work(world: World) -> tuple[str, torch.Tensor]:
        return str(torch.ones(1).device), torch.ones(1, device="cpu") + world.rank()

    with DeviceWorld(2, device="meta", backend="gloo") as world:
        assert [(device, tensor.item()) for device, tensor in world.run(work)] == [("meta", 1.0), ("meta", 2.0)]


class _Library:
    """NCCL's functions for messages: those between a start and an end are carried together, in the order of a pair."""

    def __init__(self, rank: int, mail: defaultdict[tuple[int, int], queue.Queue[bytes]]) -> None:
        self._rank, self._mail = rank, mail
        self._receives: list[Callable[[], None]] = []
        self.ncclGetErrorString = lambda code: b"invalid argument"

    def ncclGroupStart(self) -> int:
        return 0

    def ncclCommDestroy(self, communicator: Any) -> int:
        return 0

    def ncclSend(self, place: Any, size: Any, dtype: int, peer: int, *_: Any) -> int:
        if peer >= SIZE or dtype != 1:
            return 4
        self._mail[self._rank, peer].put(ctypes.string_at(place.value, size.value))
        return 0

    def ncclRecv(self, place: Any, size: Any, dtype: int, peer: int, *_: Any) -> int:
        def receive() -> None:
            content = self._mail[peer, self._rank].get(timeout=60)
            assert len(content) == size.value
            ctypes.memmove(place.value, content, len(content))

        self._receives.append(receive)
        return 0

    def ncclGroupEnd(self) -> int:
        for receive in self._receives:
            receive()
        self._receives.clear()
        return 0


class _Done(dist.Work):
    def wait(self, timeout: Any = None) -> bool:
        return True


class _HostGroup(NcclGroup):
    """A group whose calls run at once, on the CPU."""

    def _enqueue_now(self, call: Any, output: Any) -> Any:
        call([self._communicator])
        return _Done()

    def _stream(self) -> int:
        return 0

    def _synchronize(self) -> None:
        pass


def _on_ranks(work: Callable[[NcclGroup, int], Any]) -> list[Any]:
    mail: defaultdict[tuple[int, int], queue.Queue[bytes]] = defaultdict(queue.Queue)
    for pair in ((first, second) for first in range(SIZE) for second in range(SIZE)):
        mail[pair]
    results: dict[int, Any] = {}

    def run(rank: int) -> None:
        group = _HostGroup(object(), rank, SIZE, torch.device("cpu"))
        group._messages = Messages(1, _Library(rank, mail))
        register_group(group, "cpu")
        try:
            results[rank] = work(group, rank)
        finally:
            group.close()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(SIZE)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return [results[rank] for rank in range(SIZE)]


def test_ring_of_messages_arrives() -> None:
    def ring(group: NcclGroup, rank: int) -> list[float]:
        received = torch.empty(2, dtype=torch.bfloat16)
        group.send([torch.full((2,), float(rank), dtype=torch.bfloat16)], (rank + 1) % SIZE).wait()
        group.recv([received], (rank - 1) % SIZE).wait()
        return received.tolist()

    assert _on_ranks(ring) == [[2.0, 2.0], [0.0, 0.0], [1.0, 1.0]]


def test_gather_scatter_and_all_to_all_as_torch_calls_them() -> None:
    def move(group: NcclGroup, rank: int) -> tuple[Any, ...]:
        own = torch.tensor([rank, rank * 10])
        gathered = [torch.zeros(2, dtype=torch.int64) for _ in range(SIZE)] if rank == 1 else None
        dist.gather(own, gathered, group=group, group_dst=1)
        part = torch.zeros(2, dtype=torch.int64)
        parts = [torch.tensor([i, -i]) for i in range(SIZE)] if rank == 2 else None
        dist.scatter(part, parts, group=group, group_src=2)
        outputs = [torch.zeros(1, dtype=torch.int64) for _ in range(SIZE)]
        dist.all_to_all(outputs, [torch.tensor([10 * rank + i]) for i in range(SIZE)], group=group)
        uneven = torch.zeros(SIZE * (rank + 1), dtype=torch.int64)
        source = torch.arange(6) + 100 * rank
        dist.all_to_all_single(uneven, source, [rank + 1] * SIZE, [1, 2, 3], group=group)
        even = torch.zeros(SIZE, dtype=torch.int64)
        dist.all_to_all_single(even, torch.arange(SIZE) + 10 * rank, group=group)
        whole = gathered and [one.tolist() for one in gathered]
        return whole, part.tolist(), [int(one) for one in outputs], uneven.tolist(), even.tolist()

    first, second, third = _on_ranks(move)
    assert [result[0] for result in (first, second, third)] == [None, [[0, 0], [1, 10], [2, 20]], None]
    assert [result[1] for result in (first, second, third)] == [[0, 0], [1, -1], [2, -2]]
    assert [result[2] for result in (first, second, third)] == [[0, 10, 20], [1, 11, 21], [2, 12, 22]]
    assert second[3] == [1, 2, 101, 102, 201, 202]
    assert [result[4] for result in (first, second, third)] == [[0, 10, 20], [1, 11, 21], [2, 12, 22]]


def test_errors_and_a_closed_world_are_reported() -> None:
    def fail(group: NcclGroup, rank: int) -> tuple[str, str, str]:
        with pytest.raises(NcclError) as refused:
            group.send([torch.ones(1)], SIZE)
        with pytest.raises(NcclError) as layout:
            group.recv([torch.ones(4, 4).T[:2]], rank)
        group.close()
        with pytest.raises(NcclError) as closed:
            group.send([torch.ones(1)], rank)
        return str(refused.value), str(layout.value), str(closed.value)

    refused, layout, closed = _on_ranks(fail)[0]
    assert refused == "NCCL: invalid argument."
    assert layout == "hand-made NCCL worlds receive into contiguous tensors only; pass `tensor.contiguous()`."
    assert closed == "this NCCL world is closed; create another one."
    with pytest.raises(NcclError, match=r"hand-made NCCL worlds need libnccl\.so\.2"):
        Messages.of(object())


def test_world_is_joined_through_the_library() -> None:
    class _Joined(_Library):
        def ncclCommInitRank(self, place: Any, size: int, unique_id: Any, rank: int) -> int:
            if bytes(unique_id) != bytes(range(128)):
                return 4
            place._obj.value = 4096 + 16 * size + rank
            return 0

    library = _Joined(0, defaultdict(queue.Queue))
    capsule = join_world(SIZE, bytes(range(128)), 2, library)
    address = ctypes.pythonapi.PyCapsule_GetPointer
    address.restype, address.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    assert address(capsule, b"torch.cuda.nccl.Communicator") == 4096 + 16 * SIZE + 2
    with pytest.raises(NcclError, match="NCCL: invalid argument"):
        join_world(SIZE, bytes(128), 0, library)
    with pytest.raises(NcclError, match="a unique id has 128 bytes; got 3"):
        join_world(SIZE, b"abc", 0, library)


class _Queued(nn.Linear):
    """A layer that keeps the device busy for 50 ms, and for 80 ms in its backward."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        torch.get_device_module("standin").work(50)
        y = super().forward(x)
        y.register_hook(lambda _: torch.get_device_module("standin").work(80))
        return y


def _session(device: torch.device) -> RankSession:
    config = JoinConfig(
        0, 1, 0, str(device), 1, rank=0, world_size=1, backend="gloo", store="", timeout_s=60.0, recoverable=True,
        output_limit=1000,
    )  # fmt: skip
    return RankSession(config, None, device)


def _train(rank: int, store: Any) -> list[list[Any]]:
    reader = SpanReader(_session(install()))
    reader.read(since=0, watch_s=60)
    model = _Queued(2, 2)
    first = ring.position
    # While the device is behind, a pause of this process leaves no gap in its queue.
    torch.get_device_module("standin").work(2000)
    model(torch.ones(1, 2)).sum().backward()
    launched_ns = time.monotonic_ns()
    found: list[list[Any]] = []
    while len(found) < 2 and time.monotonic_ns() < launched_ns + 60_000 * _MS:
        found += reader.read(since=first + len(found), watch_s=0).spans
    return [*found, [launched_ns]]


def test_forward_and_backward_have_the_devices_times(tmp_path: Path) -> None:
    *rows, (launched_ns,) = run_on_ranks(_train, 1, tmp_path)[0]
    forward, backward = (Span(*row) for row in rows)
    assert [(span.kind, span.clock) for span in (forward, backward)] == [("forward", "gpu"), ("backward", "gpu")]
    lengths = [span.end_ns - span.start_ns for span in (forward, backward)]
    assert [round(length / _MS) for length in lengths] == [50, 80]
    # The host was done with both long before; the device did one after the other.
    assert abs(backward.start_ns - forward.end_ns) <= 1000
    assert launched_ns < backward.end_ns
    # On the host's clock, although the device counts from another origin.
    assert abs(forward.start_ns - launched_ns) < 60_000 * _MS


def _launches(rank: int, store: Any) -> list[str]:
    device = install()
    module = torch.get_device_module(device)
    spans = SpanRing()
    clock = DeviceClock(spans)

    def record() -> None:
        clock.emit(Span(0, "forward", "F", 1, 2), start)

    start = clock.moment(torch.device("cpu"))
    record()
    module.is_used = False
    start = clock.moment(device)
    record()
    module.is_used = True
    module.is_capturing = True  # an event would become a part of the graph
    start = clock.moment(device)
    record()
    module.is_capturing = False
    start = clock.moment(device)
    module.work(10_000)  # and it is never done while this runs
    record()
    return [span.clock or "host" for span in spans.since(0)[0]]


def test_span_without_events_is_a_launch(tmp_path: Path) -> None:
    assert run_on_ranks(_launches, 1, tmp_path)[0] == ["host", "host", "launch"]


def _collectives(rank: int, store: Any) -> list[tuple[str, int]]:
    device = install()
    module = torch.get_device_module(device)
    spans = SpanRing()
    clock = DeviceClock(spans)
    start = clock.moment(device)
    module.work(200)
    launched_ns = time.monotonic_ns()
    clock.emit(Span(0, "backward", "backward", start.ns, time.monotonic_ns()), start)
    while not spans.position:
        clock.collect()
    (backward,) = spans.since(0)[0]
    launched = launched_ns + time.time_ns() - time.monotonic_ns()
    done = launched + 900 * _MS
    content = dump_of(entry(1, created=launched, completed=done, duration_ms=30.0))
    (span,) = FinishedCalls(0, clock).read(content, {"0"})
    began = span.start_ns - backward.start_ns
    return [(span.clock, span.end_ns - span.start_ns), ("within", int(0 <= began <= 200 * _MS)), ("launch", began)]


def test_collective_begins_while_the_device_is_in_the_backward_that_launched_it(tmp_path: Path) -> None:
    (clock, length), within, _ = run_on_ranks(_collectives, 1, tmp_path)[0]
    assert (clock, length, within) == ("gpu", 30 * _MS, ("within", 1))
