"""NCCL without a GPU can be imported, and every use reports what is missing. With a GPU: tests/gpu."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from axon_nb.comm import NcclError, nccl
from axon_nb.comm.nccl import NcclBackend, NcclUniqueId

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


def test_a_unique_id_survives_text_encoding() -> None:
    assert NcclUniqueId.from_text(ID.to_text()) == ID
    with pytest.raises(NcclError, match="is not a unique id"):
        NcclUniqueId.from_text("not base64!")
