"""NCCL without a GPU: importable, and every use says what is missing. With one: tests/gpu."""

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


@pytest.mark.skipif(torch.cuda.is_available(), reason="tells what happens without a GPU")
@pytest.mark.parametrize("use", USES)
def test_without_nccl_every_use_says_why(use: Callable[[], object]) -> None:
    assert not nccl.is_available()
    with pytest.raises(NcclError, match=r"NCCL: (this build of torch|no CUDA device).*use Backend\.GLOO"):
        use()


def test_a_unique_id_goes_through_text() -> None:
    assert NcclUniqueId.from_text(ID.to_text()) == ID
    with pytest.raises(NcclError, match="is no unique id"):
        NcclUniqueId.from_text("not base64!")
