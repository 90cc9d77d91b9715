"""GPUs that a cluster has reserved: others leave them alone, and a cluster that dies gives them up."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from axon_nb.cluster.launch.placement import Layout, plan_layout
from axon_nb.errors import UsageError
from axon_nb.records.protocol.agent import ReserveGpus
from tests.support.agents import Served, dead, serve
from tests.support.nvidia_smi import A100X4, MIG, Driver
from tests.support.processes import until

FIRST = "GPU-5c0e8f1a-3f6f-1b5e-9d0c-6a1f1d9a7b10"
Reserve = Callable[[str, Layout], tuple[Served, dict[str, str]]]


@pytest.fixture
def driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Driver:
    """A machine with four cards, of which 1 is in use."""
    driver = Driver(tmp_path, monkeypatch)
    driver.prints(A100X4)
    return driver


@pytest.fixture
def reserve() -> Iterator[Reserve]:
    """Starts an agent that reserves the GPUs of a layout; returns it, and which are taken."""
    agents: list[Served] = []

    def start(name: str, layout: Layout) -> tuple[Served, dict[str, str]]:
        agents.append(serve(entry="", controller=[], owner=name))
        return agents[-1], dict(agents[-1].client.call(ReserveGpus(layout.reserves, name)).owners)

    yield start
    for agent in agents:
        agent.end()


def test_second_cluster_gets_the_gpus_that_the_first_left(driver: Driver, reserve: Reserve) -> None:
    first = plan_layout(1)
    assert first.reserves == (FIRST,), "one rank needs one of the three free cards"
    agent, taken = reserve("first", first)
    assert not taken
    second = plan_layout(None)
    assert (second.visible, second.num_ranks) == ("2,3", 2)
    assert second.notes[0] == (
        "Skipping GPU 0 (reserved by the cluster 'first'): run `axon-nb stop first` if it is not needed any more, or "
        "pass `--devices 0` to share it."
    )
    _, taken = reserve("second", second)
    assert not taken
    with pytest.raises(UsageError, match="NCCL needs GPUs, and none is free here"):
        plan_layout(2, backend="nccl")
    assert not agent.client.call(ReserveGpus(first.reserves, "first")).owners, "what it has it may ask for again"


def test_named_gpu_is_shared_and_the_other_cluster_named(driver: Driver, reserve: Reserve) -> None:
    reserve("first", plan_layout(1))
    shared = plan_layout(1, devices="0")
    assert shared.notes == ("GPU 0 is reserved by the cluster 'first', too: both share its memory and its time.",)
    _, taken = reserve("second", shared)
    assert taken == {FIRST: "first"}


def test_killed_cluster_gives_its_gpus_up(driver: Driver, reserve: Reserve) -> None:
    agent, _ = reserve("first", plan_layout(None))
    assert plan_layout(None).devices[0] == "cpu"
    agent.process.kill()
    assert until(lambda: dead(agent.process))
    assert plan_layout(None).visible == "0,2,3"


def test_mig_instances_are_reserved_one_by_one(driver: Driver, reserve: Reserve) -> None:
    driver.prints(A100X4, listing=MIG)
    first, second = (line.split("UUID: ")[1].rstrip(")") for line in MIG.splitlines()[2:4])
    reserve("first", plan_layout(1, devices=first))
    assert second in str(plan_layout(None).visible)
    assert first not in str(plan_layout(None).visible)
