"""Which adapter a torch gets, and that it fits the torch that runs."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from axon_nb.torch_api import Torch210, Torch211, Torch212, Torch213, Torch214, TorchApi, adapter_for, torch_api


@pytest.mark.parametrize(
    ("version", "expected"),
    [
        ("2.8.0+cu128", Torch210),
        ("2.10.0a0+b4e4ee81d3", Torch210),
        ("2.11.0", Torch211),
        ("2.11.1+cu130", Torch211),
        ("2.12.0a0+git123", Torch212),
        ("2.13.0+cpu", Torch213),
        ("2.14.1+cu130", Torch214),
        ("2.15.0+cu132", TorchApi),
        ("2.16.0.dev20261101", TorchApi),
        ("3.0.0", TorchApi),
    ],
)
def test_version_selects_its_adapter_and_newer_ones_the_newest(version: str, expected: type[TorchApi]) -> None:
    assert adapter_for(version) is expected


def test_adapter_methods_exist_in_this_torch() -> None:
    api = torch_api()
    assert type(api) is adapter_for(torch.__version__)
    assert callable(getattr(dist.ProcessGroup, api.gather_method))
    assert callable(getattr(dist.ProcessGroup, api.scatter_method))
    assert callable(api.all_gather_single)
    assert callable(api.reduce_scatter_single)
    fields = {name for name, value in vars(dist.distributed_c10d._World).items() if isinstance(value, property)}
    assert set(api.world_fields) <= fields
    assert bool(api.nccl_classes()) == dist.is_nccl_available()
