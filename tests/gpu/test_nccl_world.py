"""NCCL worlds made by hand, on the GPUs there are; and arrays of CuPy in collectives."""

from __future__ import annotations

import functools

import pytest
import torch

from axon_nb import comm
from axon_nb.comm import NcclError, ProcessGroup, nccl
from axon_nb.comm.nccl import NcclBackend

pytestmark = pytest.mark.gpu


def test_version_and_devices() -> None:
    major, _, _ = nccl.nccl_version()
    assert major >= 2
    assert len(nccl.devices()) == torch.cuda.device_count()


def test_world_over_all_gpus() -> None:
    count = torch.cuda.device_count()
    backends = NcclBackend.create_world(range(count))
    groups = [ProcessGroup.from_backend(backend) for backend in backends]
    tensors = [torch.full((3,), float(rank + 1), device=f"cuda:{rank}") for rank in range(count)]
    pairs = list(zip(tensors, groups, strict=True))
    handles = [comm.all_reduce_sum(tensor, group=group, async_op=True) for tensor, group in pairs]
    total = count * (count + 1) / 2
    for handle, backend in zip(handles, backends, strict=True):
        backend.synchronize()
        assert handle.wait().tolist() == [total] * 3
        assert (backend.world_size(), backend.nccl_version()) == (count, nccl.nccl_version())


def test_messages_between_all_gpus_and_the_end_of_the_world() -> None:
    count = torch.cuda.device_count()
    backends = NcclBackend.create_world(range(count))
    devices = [torch.device("cuda", rank) for rank in range(count)]
    sent = [torch.arange(count, device=device) + 10 * rank for rank, device in enumerate(devices)]
    received = [torch.empty(count, dtype=torch.int64, device=device) for device in devices]
    calls = zip(backends, received, sent, strict=True)
    for work in [backend.group.all_to_all_single(output, tensor, [], []) for backend, output, tensor in calls]:
        work.wait()
    expected = [[10 * source + rank for source in range(count)] for rank in range(count)]
    assert [output.tolist() for output in received] == expected
    if count > 1:
        ring = [torch.full((3,), float(rank), device=device) for rank, device in enumerate(devices)]
        echo = [torch.empty(3, device=device) for device in devices]
        works = []
        for rank, backend in enumerate(backends):
            send = functools.partial(backend.group.send, [ring[rank]], (rank + 1) % count)
            receive = functools.partial(backend.group.recv, [echo[rank]], (rank - 1) % count)
            # In the order of the stream: not all may send first.
            works += [call() for call in ((send, receive) if rank % 2 else (receive, send))]
        for work in works:
            work.wait()
        assert [tensor[0].item() for tensor in echo] == [(rank - 1) % count for rank in range(count)]
    for backend in backends:
        backend.close()
    with pytest.raises(NcclError, match="this NCCL world is closed"):
        backends[0].group.barrier()


def test_one_rank_by_a_unique_id() -> None:
    backend = NcclBackend(NcclBackend.generate_unique_id(), 0, 1, 0)
    group = ProcessGroup.from_backend(backend)
    tensor = torch.arange(4.0, device="cuda:0")
    assert comm.all_gather(tensor, group=group).tolist() == [0.0, 1.0, 2.0, 3.0]
    assert comm.reduce_scatter_mean(tensor, group=group).tolist() == [0.0, 1.0, 2.0, 3.0]
    with pytest.raises(NcclError, match="devices must list at least one GPU, each once"):
        NcclBackend.create_world([0, 0])


def test_cupy_arrays_change_in_place() -> None:
    cupy = pytest.importorskip("cupy")
    group = ProcessGroup.from_backend(NcclBackend.create_world([0])[0])
    array = cupy.arange(4, dtype=cupy.float32)
    assert comm.all_reduce_mean(array, group=group) is array
    assert array.tolist() == [0.0, 1.0, 2.0, 3.0]
    assert isinstance(comm.all_gather(array, group=group), cupy.ndarray)
