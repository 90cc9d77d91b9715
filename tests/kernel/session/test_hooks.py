"""Live kernels have the hooks that the register lists for them, beside those of their classes (tests/engine)."""

from __future__ import annotations

from collections.abc import Callable

from tests.support.kernel import Kernel
from tests.support.processes import footprint, until


def test_notebook_kernel_has_the_hooks(kernel: Kernel) -> None:
    kernel.ok("from axon_nb.records.hooks import missing_hooks")
    for group in ("front_end.help", "front_end.requests", "session.shutdown", "stop_button.presses"):
        assert kernel.value(f"missing_hooks({group!r}, kernel=get_ipython().kernel)") == [], group
    assert kernel.value("missing_hooks('stop_button.shell', shell=get_ipython())") == []


def test_ipykernel_and_torch_have_the_hooks_of_ranks(kernel: Kernel) -> None:
    reply = kernel.ok(
        "%%distributed --ranks 0\n"
        "from axon_nb.records.hooks import missing_hooks\nfrom axon_nb.engine import frames\n"
        "print(missing_hooks('kernel.cells', kernel=get_ipython().kernel), missing_hooks('groups.install'))\n"
        "print(type(dist.group.WORLD).__name__, 'allreduce' in frames.group_operations(), dist.get_backend())"
    )
    assert reply.lines() == ["[rank 0] [] []", "[rank 0] RecoverableGroup True gloo"]


def test_rank_looks_at_no_files_of_modules_for_a_debugger(kernel: Kernel) -> None:
    reply = kernel.ok(
        "%%distributed --ranks 0\nimport sys\nfrom ipykernel import ipkernel\n"
        "print(get_ipython().kernel._kernel_modules, ipkernel.sys is sys)"
    )
    assert reply.lines() == ["[rank 0] [] True"]


def test_restart_and_shutdown_are_distinguished(kernel: Kernel) -> None:
    code = "get_ipython().kernel.do_shutdown.__module__"
    assert kernel.ok(code).result == "'axon_nb.cluster.session.current'"


def test_shutdown_stops_the_ranks_without_the_hook(new_kernel: Callable[..., Kernel]) -> None:
    kernel = new_kernel()
    kernel.ok("own = get_ipython().kernel\nfull = own.do_shutdown\nown.do_shutdown = lambda again: full(again)")
    kernel.ok("%load_ext axon_nb\n%distributed start -n 2")
    assert kernel.ok("own.do_shutdown.__name__").result == "'<lambda>'"
    left = footprint(kernel)
    kernel.shutdown()
    assert until(left.gone)
