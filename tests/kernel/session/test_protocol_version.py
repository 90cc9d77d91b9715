"""A notebook and ranks of different versions refuse each other with a sentence, and the way it names works."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from axon_nb.records.protocol.wire import PROTOCOL
from tests.support.kernel import Kernel
from tests.support.processes import footprint

pytestmark = pytest.mark.timeout(600)

MakeKernel = Callable[..., Kernel]

ANOTHER = "import axon_nb.records.protocol.wire as t_version\nt_version.PROTOCOL += 1"
"""From here on this kernel speaks another protocol than the processes that run already."""


def test_attach_to_ranks_of_another_protocol_is_refused(new_kernel: MakeKernel) -> None:
    kernel = new_kernel()
    kernel.ok("%load_ext axon_nb\n%distributed start -n 2")
    kernel.ok("%%distributed\nkept = 40 + rank")
    folder = kernel.value("str(__import__('axon_nb').cluster.current.get().connection.run_dir.path)")
    kernel.come_back()
    kernel.ok(f"%load_ext axon_nb\n{ANOTHER}")
    refused = kernel.run("%distributed attach")
    assert refused.ename == "UsageError"
    assert f"(protocol {PROTOCOL}), but this notebook has axon_nb" in refused.traceback
    assert f"(protocol {PROTOCOL + 1}). Run `%distributed start` to start new ranks." in refused.traceback
    # Ranks of an axon_nb that had no number yet.
    file = Path(folder) / "agent.json"
    info = json.loads(file.read_text())
    version = info.pop("version")
    file.write_text(json.dumps(info))
    refused = kernel.run("%distributed attach")
    assert "run an older axon_nb, but this notebook has axon_nb" in refused.traceback
    # The ranks were left alone: the same version gets them back.
    file.write_text(json.dumps({**info, "version": version}))
    kernel.ok("t_version.PROTOCOL -= 1\n%distributed attach")
    assert kernel.ok("%%distributed\nkept").lines() == ["[rank 0] 40", "[rank 1] 41"]


def test_start_works_where_attach_is_rejected(new_kernel: MakeKernel) -> None:
    kernel = new_kernel()
    kernel.ok("%load_ext axon_nb\n%distributed start -n 2")
    old = footprint(kernel).ranks
    kernel.come_back()
    kernel.ok(f"import os\nos.environ['AXON_NB_WARM_UP'] = '0'\n{ANOTHER}\n%load_ext axon_nb")
    assert kernel.run("%distributed attach").ename == "UsageError"
    kernel.ok("t_version.PROTOCOL -= 1")  # the ranks of this kernel import the number from the file
    kernel.ok("%distributed start -n 1")
    assert not set(footprint(kernel).ranks) & set(old)


def test_ranks_of_another_protocol_are_rejected(new_kernel: MakeKernel) -> None:
    kernel = new_kernel()
    kernel.ok(f"%load_ext axon_nb\n{ANOTHER}")
    refused = kernel.run("%distributed start -n 2")
    assert refused.ename == "StartError"
    assert "Rank 0 on " in refused.traceback
    assert "Install axon_nb" in refused.traceback
    kernel.ok("t_version.PROTOCOL -= 1\n%distributed start -n 2")
    assert kernel.ok("%%distributed\nrank").lines() == ["[rank 0] 0", "[rank 1] 1"]
