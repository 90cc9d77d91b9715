"""Settings of a running cluster: what acts at once does, and what does not says so."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.kernel import Kernel
from tests.support.processes import ended, footprint, until

MakeKernel = Callable[..., Kernel]

API = "settings = __import__('axon_nb').cluster.current.session().settings"
AGENT_INFO = (
    "__import__('axon_nb').current_cluster().connection.agent"
    ".call(__import__('axon_nb.records.protocol.agent', fromlist=['x']).GetInfo()).info"
)


def values(kernel: Kernel) -> list[str]:
    """The list of settings, without what each does."""
    return [line.split("  ")[0] for line in kernel.ok("%distributed config").lines()]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("%distributed config keep_alive=3", ["keep_alive = 3 s (in effect now)"]),
        (f"{API}\nsettings.keep_alive = 3", []),
    ],
    ids=["magic", "attribute"],
)
def test_shorter_keep_alive_applies_to_the_running_cluster(
    new_kernel: MakeKernel, change: str, said: list[str]
) -> None:
    kernel = new_kernel()
    kernel.ok("%load_ext axon_nb\n%distributed start -n 2")
    assert kernel.ok(change).lines() == said
    left = footprint(kernel)
    own = [process for process in left.processes if process.pid in (left.agent, left.controller, *left.ranks)]
    killed_at = time.monotonic()
    kernel.kill()
    assert until(lambda: any(map(ended, own)))  # a minute, and not the 300 s with which the cluster was started
    assert time.monotonic() - killed_at >= 3.0, "all of them live as long as that"
    assert until(left.gone)


def test_longer_keep_alive_applies_and_survives_attach(new_kernel: MakeKernel) -> None:
    kernel = new_kernel()
    kernel.ok("%load_ext axon_nb\n%distributed config keep_alive=1\n%distributed start -n 2")
    kernel.ok("%%distributed\nkept = rank + 10")
    reply = kernel.ok("%distributed config keep_alive=10min output_limit=2MiB")
    assert reply.lines() == ["keep_alive = 600 s (in effect now)", "output_limit = 2 MiB (from the next cell)"]
    left = footprint(kernel)
    kernel.kill()
    assert not until(left.gone, timeout=6.0)
    kernel.restart(now=True)
    kernel.ok("%load_ext axon_nb\n%distributed config output_limit=4KiB\n%distributed attach")
    assert kernel.ok("%%distributed\nkept").lines() == ["[rank 0] 10", "[rank 1] 11"]
    listed = values(kernel)
    assert listed[0] == "keep_alive = 600 s (default 300 s)"
    assert "output_limit = 4 KiB (default 1 MiB)" in listed
    agent_says = kernel.value(f"(lambda i: (i.keep_alive_s, i.settings['output_limit']))({AGENT_INFO})")
    assert agent_says == (600.0, 4096)


WAIT_IN_VAIN = """%%distributed
import time
from datetime import timedelta
from pathlib import Path

given_up = Path({given_up!r})
own = dist.new_group([0, 1])
limits = own.timeout.total_seconds(), own.memory._rounds.timeout_s
own.memory.set_timeout(timedelta(seconds=3))  # not earlier: forming the group may take as long as a collective
if rank == 0:
    try:
        dist.all_reduce(torch.ones(1), group=own)
    except RuntimeError as error:
        print(limits, error)
    finally:
        given_up.touch()
while not given_up.exists():
    time.sleep(0.05)
"""


def test_new_group_has_the_collective_timeout(new_kernel: MakeKernel, tmp_path: Path) -> None:
    """The start has it, too, so that a short one could fail on a busy machine."""
    kernel = new_kernel()
    kernel.ok("%load_ext axon_nb\n%distributed config collective_timeout=600\n%distributed start -n 2 --devices cpu")
    reply = kernel.ok(WAIT_IN_VAIN.format(given_up=str(tmp_path / "given_up")))
    assert reply.lines() == ["[rank 0] (600.0, 600.0) timed out while waiting for rank 1"]


def test_output_limit_applies_to_the_next_cell(kernel: Kernel) -> None:
    flood = "%%distributed --ranks 0\nfor i in range(1000):\n    print(i, 'x' * 90)"
    assert len(kernel.ok(flood).lines()) == 1000
    assert kernel.ok("%distributed config output_limit=4KiB").lines() == ["output_limit = 4 KiB (from the next cell)"]
    reply = kernel.ok(flood)
    assert len(reply.lines()) < 200
    assert (
        "not shown: the limit is 4 KiB per cell; run `%distributed config output_limit=4MiB` to raise it"
        in reply.stderr
    )
    kernel.ok("%distributed config output_limit=1MiB")
    assert len(kernel.ok(flood).lines()) == 1000


def test_start_setting_applies_after_a_restart_with_a_note(new_kernel: MakeKernel) -> None:
    kernel = new_kernel()
    kernel.ok("%load_ext axon_nb\n%distributed config threads=1\n%distributed start -n 2")
    ask = "%%distributed\n(dist.group.WORLD.timeout.total_seconds(), torch.get_num_threads())"
    assert kernel.ok(ask).lines() == ["[ranks 0-1] (1800.0, 1)"]
    assert kernel.ok("%distributed config collective_timeout=1min threads=2").lines() == [
        "collective_timeout = 60 s (from the next start; this cluster keeps 1800 s)",
        "threads = 2 (from the next start; this cluster keeps 1)",
    ]
    assert kernel.ok(ask).lines() == ["[ranks 0-1] (1800.0, 1)"]
    listed = values(kernel)
    assert "collective_timeout = 60 s (from the next start; this cluster keeps 1800 s; default 1800 s)" in listed
    kernel.ok("%distributed restart")
    assert kernel.ok(ask).lines() == ["[ranks 0-1] (60.0, 2)"]
    assert "collective_timeout = 60 s (default 1800 s)" in values(kernel)


def test_settings_come_from_ipythons_configuration_file(new_kernel: MakeKernel, tmp_path: Path) -> None:
    file = tmp_path / "profile_default" / "ipython_config.py"
    file.parent.mkdir()
    file.write_text("c.AxonNB.keep_alive = '10min'\nc.AxonNB.warm_up = False\nc.AxonNB.threads = 2\n")
    kernel = new_kernel(IPYTHONDIR=str(tmp_path))
    kernel.ok("%load_ext axon_nb")
    assert [line for line in values(kernel) if "default" in line] == [
        "keep_alive = 600 s (default 300 s)",
        "warm_up = off (default on)",
        "threads = 2 (default 0)",
    ]
    file.write_text("c.AxonNB.keep_alive = '10 apples'\n")
    reply = new_kernel(IPYTHONDIR=str(tmp_path)).run("%load_ext axon_nb")
    assert reply.traceback == (
        "UsageError: c.AxonNB in IPython's configuration: keep_alive must be a number of seconds, such as 300 or 5min; "
        "got '10 apples'."
    )


def test_warm_up_starts_and_ends_the_waiting_host_agent(new_kernel: MakeKernel) -> None:
    kernel = new_kernel(AXON_NB_CLASS="1")
    kernel.ok("%load_ext axon_nb")
    shared = {"warm_up = off (default on)", "threads = 1 (default 0)", "keep_alive = 30 s (default 300 s)"}
    assert shared <= set(values(kernel))
    base = Path(kernel.value("str(__import__('axon_nb.host.run_dir', fromlist=['x']).base_dir())"))

    def waiting() -> list[str]:
        return [name for name in os.listdir(base) if _starter(base / name) == kernel.pid]

    assert waiting() == []
    assert kernel.ok("%distributed config warm_up=on").lines() == ["warm_up = on"]
    assert until(waiting)
    kernel.ok("%distributed config warm_up=off")
    assert until(lambda: not waiting())


def _starter(folder: Path) -> int | None:
    try:
        return int((folder / "starter").read_text())
    except (OSError, ValueError):
        return None
