"""Programs and bug reports of others as cells on ranks: each file of `situations` has its source and what is expected.

Cells run in order. `status`, `contains` and `lacks` say how one ends and what it shows; afterwards the ranks still
communicate.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.kernel import Kernel, Reply

SITUATIONS = sorted((Path(__file__).parent / "situations").glob("*.toml"))
LONG = {"compile", "compiled_functions", "huge_output", "init_spawn_torchrun", "live_plots", "subprocess_shell", "tqdm"}
"""Situations that take more than 15 s on two cores."""


def shown(reply: Reply) -> str:
    """Everything that a cell shows, with the kinds of its displays."""
    displays = [f"{' '.join(data)}\n{data.get('text/plain', '')}" for data in reply.displays]
    return "\n".join([reply.shown(), reply.result, *displays])


@contextlib.contextmanager
def answering(kernel: Kernel, answer: str) -> Iterator[None]:
    """Answer each prompt meanwhile, as a user would."""
    over, prompts = threading.Event(), kernel.client.stdin_channel.socket

    def answer_prompts() -> None:
        while not over.is_set():
            if prompts.poll(200):
                prompts.recv_multipart()
                kernel.client.input(answer)

    thread = threading.Thread(target=answer_prompts, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def run(kernel: Kernel, cell: dict[str, Any], answer: str) -> Reply:
    """Run one cell as its situation asks for."""
    time.sleep(cell.get("sleep", 0))
    request = kernel.submit(cell["code"])
    for seconds in cell.get("interrupt_after", ()):
        time.sleep(seconds)
        kernel.interrupt()
    with answering(kernel, answer) if answer else contextlib.nullcontext():
        return kernel.collect(request)


@pytest.mark.parametrize(
    "path",
    [pytest.param(path, marks=pytest.mark.slow if path.stem in LONG else (), id=path.stem) for path in SITUATIONS],
)
def test_program_ends_as_users_expect(path: Path, tmp_path: Path) -> None:
    situation = tomllib.loads(path.read_text(encoding="utf-8"))
    if name := situation.get("needs"):
        pytest.importorskip(name)
    search = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    with Kernel(cwd=tmp_path, env={"PATH": search}) as kernel:
        kernel.ok("%load_ext axon_nb")
        kernel.ok(f"%distributed start -n {situation.get('ranks', 2)} {situation.get('start', '')}")
        for cell in situation["cell"]:
            reply = run(kernel, cell, situation.get("answer", ""))
            text = shown(reply)
            if status := cell.get("status"):
                assert reply.status == status, f"{cell['code']}\n{text}"
            assert not [part for part in cell.get("contains", ()) if part not in text], f"{cell['code']}\n{text}"
            if any(kind == "clear_output" for _, kind, _ in reply.arrivals):
                text = reply.after_clear()
            assert not [part for part in cell.get("lacks", ()) if part in text], f"{cell['code']}\n{text}"
        kernel.ok("%%distributed\nhealth = torch.ones(1)\ndist.all_reduce(health)\nassert health.item() == world_size")
        kernel.ok("%distributed stop")
