"""What other tools do when a rank fails, in a real kernel: one rank raises, one is killed, the user presses stop.

Run it with the Python of an environment that has the tool, torch, IPython and jupyter_client:

    python -m venv peer && peer/bin/pip install torch ipykernel nbdistributed
    peer/bin/python benchmarks/peers.py nbdistributed

It needs nothing of this project, and prints what each step answered, after how long, and the end of what it showed.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path
from queue import Empty
from typing import NamedTuple

import psutil
from jupyter_client.manager import KernelManager, start_new_kernel

LIMIT_S = 60.0
"""A cell that has not ended by then is interrupted, as a user would do."""
SUM = "import torch, torch.distributed as dist\nx = torch.ones(1)\ndist.all_reduce(x)\nprint('sum', x.item())"
RAISES = "if dist.get_rank() == 1:\n    raise KeyError('missing')\ndist.all_reduce(x)"
KILLED = "import os, signal\nif dist.get_rank() == 1:\n    os.kill(os.getpid(), signal.SIGKILL)\ndist.all_reduce(x)"
HANGS = "if dist.get_rank() == 0:\n    dist.all_reduce(x)\nelse:\n    import time\n    time.sleep(10_000)"


class Peer(NamedTuple):
    """How a tool is used."""

    package: str
    start: str
    cell: str
    """Runs `{code}` on the ranks."""


_LAUNCHED = (
    "from accelerate import notebook_launcher\ndef main():\n    import torch, torch.distributed as dist\n"
    "    from accelerate import Accelerator\n    Accelerator(cpu=True)\n    x = torch.ones(1)\n{code}\n"
    "notebook_launcher(main, num_processes=2, use_port='29731')"
)
_GROUP = (
    "import torch.distributed as dist\n"
    "dist.init_process_group('gloo', init_method='file://' + store, rank=number, world_size=2)"
)
PEERS = {
    "axon_nb": Peer("axon_nb", "%load_ext axon_nb\n%distributed start -n 2", "%%distributed\n{code}"),
    "ipyparallel": Peer(
        "ipyparallel",
        "import os, ipyparallel as ipp\nclient = ipp.Cluster(n=2).start_and_connect_sync()\n"
        "client[:].scatter('number', [0, 1], flatten=True)\nclient[:].push({'store': os.path.abspath('store')})\n"
        f"client[:].execute({_GROUP!r}, block=True)",
        "%%px --block\n{code}",
    ),
    "nbdistributed": Peer("nbdistributed", "%load_ext nbdistributed\n%dist_init -n 2", "%%distributed\n{code}"),
    "notebook_launcher": Peer("accelerate", "pass", _LAUNCHED),
}


def _cell(peer: Peer, code: str) -> str:
    indented = "".join(f"    {line}\n" for line in code.splitlines())
    return peer.cell.format(code=indented if peer.cell is _LAUNCHED else code)


class _Notebook:
    """A kernel that runs cells, and is interrupted when one does not end."""

    def __init__(self, folder: str) -> None:
        self.manager: KernelManager
        self.manager, self.client = start_new_kernel(cwd=folder)

    def run(self, code: str, limit_s: float = LIMIT_S) -> str:
        """Run a cell, and interrupt it after `limit_s` seconds; return how it ended and what it showed."""
        began, end, note = time.monotonic(), time.monotonic() + limit_s, ""
        asked = self.client.execute(code)
        shown: list[str] = []
        while True:
            try:
                message = self.client.get_iopub_msg(timeout=max(0.1, end - time.monotonic()))
            except Empty:
                if note:
                    return f"never ended: {note}, {limit_s / 2:g} s ago | {_tail(shown)}"
                self.manager.interrupt_kernel()
                note, end = f"interrupted after {limit_s:g} s", time.monotonic() + limit_s / 2
                continue
            if message["parent_header"].get("msg_id") != asked:
                continue
            kind, content = message["msg_type"], message["content"]
            if kind == "stream":
                shown.append(content["text"])
            elif kind == "display_data":
                shown.append(content["data"].get("text/plain", ""))
            elif kind == "error":
                shown += content["traceback"]
            elif kind == "status" and content["execution_state"] == "idle":
                break
        reply = self.client.get_shell_msg(timeout=30)
        while reply["parent_header"].get("msg_id") != asked:
            reply = self.client.get_shell_msg(timeout=30)
        ended = f"{reply['content']['status']} after {time.monotonic() - began:.1f} s"
        return f"{', '.join(filter(None, [ended, note]))} | {_tail(shown)}"

    def close(self) -> None:
        """End the kernel and what it has started."""
        started = psutil.Process(self.manager.provisioner.pid).children(recursive=True)
        self.client.stop_channels()
        self.manager.shutdown_kernel(now=True)
        for process in started:
            with contextlib.suppress(psutil.Error):
                process.kill()


def _tail(shown: list[str]) -> str:
    lines = re.sub(r"\x1b\[[0-9;]*m", "", "\n".join(shown)).strip().splitlines()
    return " ⏎ ".join(line.strip() for line in lines[-6:] if line.strip())[-500:]


def _measure(peer: Peer) -> None:
    steps = {"one rank raises": RAISES, "one rank is killed": KILLED, "stop button in a hang": HANGS}
    for name, code in steps.items():
        with tempfile.TemporaryDirectory() as folder:
            notebook = _Notebook(folder)
            try:
                began = time.monotonic()
                started = notebook.run(peer.start, 120.0)
                first, cells = "", 0
                while "sum" not in first and cells < 3:
                    first, cells = notebook.run(_cell(peer, SUM)), cells + 1
                seconds = time.monotonic() - began
                print(f"{name}: start: {started}")
                print(f"  first sum in cell {cells}, {seconds:.1f} s after the start: {first}", flush=True)
                print(f"  then: {notebook.run(_cell(peer, code), 10.0 if code is HANGS else LIMIT_S)}", flush=True)
                print(f"  next cell: {notebook.run(_cell(peer, SUM))}", flush=True)
            finally:
                notebook.close()


def _measure_torchrun() -> None:
    setup = "import torch, torch.distributed as dist\ndist.init_process_group('gloo')\nx = torch.ones(1)\n"
    for name, code in {"one rank raises": RAISES, "one rank is killed": KILLED, "stop button in a hang": HANGS}.items():
        with tempfile.TemporaryDirectory() as folder:
            script = Path(folder, "script.py")
            script.write_text(setup + code, encoding="utf-8")
            began = time.monotonic()
            command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", script]
            run = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
            try:
                shown, _ = run.communicate(timeout=20.0 if code is HANGS else LIMIT_S)
            except subprocess.TimeoutExpired:
                os.kill(run.pid, signal.SIGINT)
                shown, _ = run.communicate(timeout=LIMIT_S)
            print(
                f"{name}: exit {run.returncode} after {time.monotonic() - began:.1f} s | {_tail([shown])}", flush=True
            )


def main() -> None:
    """Measure the tool named on the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("peer", choices=[*PEERS, "torchrun"])
    name = parser.parse_args().peer
    os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    package = PEERS[name].package if name in PEERS else "torch"
    print(f"{name}: {package} {version(package)}, torch {version('torch')}, Python {sys.version.split()[0]}")
    if name == "torchrun":
        _measure_torchrun()
    else:
        _measure(PEERS[name])


if __name__ == "__main__":
    main()
