"""Ranks on a GPU: one on NCCL, two that share a card on Gloo."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import axon_nb

pytestmark = pytest.mark.gpu


@pytest.fixture
def nccl() -> Iterator[axon_nb.Cluster]:
    """One NCCL rank."""
    with axon_nb.start(1, backend="nccl") as cluster:
        yield cluster


@pytest.fixture
def shared_card() -> Iterator[axon_nb.Cluster]:
    """Two Gloo ranks on one card."""
    with axon_nb.start(2, backend="gloo", devices="0") as cluster:
        yield cluster


def test_one_nccl_rank(nccl: axon_nb.Cluster) -> None:
    code = "t = torch.ones(4, device=device); dist.all_reduce(t); (str(device), dist.get_backend(), t.tolist())"
    assert nccl.run(code)[0] == ("cuda:0", "nccl", [1.0] * 4)


def test_two_gloo_ranks_share_a_card(shared_card: axon_nb.Cluster) -> None:
    result = shared_card.run(
        """
t = torch.full((3,), float(rank + 1), device=device)
dist.all_reduce(t)
torch.manual_seed(0)
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 2).to(device))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model(torch.randn(4, 8, device=device, generator=torch.Generator(device).manual_seed(rank))).square().mean().backward()
optimizer.step()
(str(device), t.tolist(), sum(p.double().sum().item() for p in model.parameters()))
"""
    )
    assert result[0] == result[1]
    assert result[0][:2] == ("cuda:0", [3.0, 3.0, 3.0])


def test_a_failing_rank_releases_the_other_on_the_card(shared_card: axon_nb.Cluster) -> None:
    with pytest.raises(axon_nb.CellError, match="bug"):
        shared_card.run("if rank == 1: raise ValueError('bug')\ndist.all_reduce(torch.ones(1, device=device))")
    result = shared_card.run("t = torch.ones(1, device=device); dist.all_reduce(t); t.item()")
    assert dict(result.values) == {0: 2.0, 1: 2.0}
