"""NCCL without a GPU can be imported, and every use reports what is missing. With a GPU: tests/gpu."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from axon_nb.comm import Backend, NcclError, World, nccl
from axon_nb.comm.group import choose_backend
from axon_nb.comm.nccl import NcclBackend, NcclUniqueId
from tests.support.ranks import DeviceWorld

ID = NcclUniqueId(b"\x00\x01" * 64)
USES: list[Callable[[], object]] = [
    nccl.nccl_version,
    nccl.devices,
    NcclBackend.generate_unique_id,
    lambda: NcclBackend.create_world([0, 1]),
    lambda: NcclBackend(ID, 0, 1, 0),
]


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
