"""The private names of ipykernel, ipyparallel and torch that the project leans on are there in the pinned versions."""

from __future__ import annotations

from axon_nb.cluster.rpc import client
from tests.kernel.driver import Kernel


def test_ipyparallel_has_what_the_client_needs() -> None:
    assert client.missing() == []


def test_ipykernel_and_torch_have_what_ranks_need(kernel: Kernel) -> None:
    reply = kernel.ok(
        "%%distributed --ranks 0\n"
        "from axon_nb.engine.kernel import hooks\nfrom axon_nb.engine.groups import install, recoverable\n"
        "print(hooks.missing(get_ipython().kernel), install.missing_group_hooks())\n"
        "print(type(dist.group.WORLD).__name__, 'allreduce' in recoverable.operations(), dist.get_backend())"
    )
    assert reply.lines() == ["[rank 0] [] []", "[rank 0] RecoverableGroup True gloo"]


def test_a_restart_and_a_shutdown_are_told_apart(kernel: Kernel) -> None:
    code = "from axon_nb.cluster.session import current\nget_ipython().kernel.do_shutdown.__module__"
    assert kernel.ok(code).result == "'axon_nb.cluster.session.current'"
