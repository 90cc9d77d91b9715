"""Distinguishes threads that may still communicate from those of libraries."""

from __future__ import annotations

import os
import queue
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import zmq
from torch.utils.data import DataLoader

from axon_nb.engine.kernel.control import user_threads
from axon_nb.records.stacks import library_of


def test_user_thread_counts_until_it_ends() -> None:
    go_on = threading.Event()
    thread = threading.Thread(target=lambda: go_on.wait(60), name="the user's")
    thread.start()
    assert "the user's" in user_threads()
    go_on.set()
    thread.join()
    assert "the user's" not in user_threads()


def test_pool_thread_counts_while_running_user_code() -> None:
    go_on, begun = threading.Event(), threading.Event()

    def work() -> None:
        begun.set()
        go_on.wait(60)

    with ThreadPoolExecutor(1, thread_name_prefix="pool") as pool:
        pool.submit(os.getpid).result()
        assert "pool_0" in [thread.name for thread in threading.enumerate()]
        assert "pool_0" not in user_threads()
        job = pool.submit(work)
        begun.wait(60)
        assert "pool_0" in user_threads()
        go_on.set()
        job.result()


def test_timer_counts_before_it_starts() -> None:
    timer = threading.Timer(600, os.getpid)
    timer.name = "timer"
    timer.start()
    assert "timer" in user_threads()
    timer.cancel()
    timer.join()


def test_library_threads_do_not_count() -> None:
    thread = threading.Thread(target=queue.Queue[int]().get, name="waits in a library", daemon=True)
    thread.start()
    before = set(user_threads())
    loader = iter(DataLoader(range(8), num_workers=1))
    next(loader)
    assert {thread.name for thread in threading.enumerate()} >= {"QueueFeederThread", "waits in a library"}
    assert set(user_threads()) == before
    assert "waits in a library" not in before


def test_zmq_thread_does_not_count() -> None:
    with zmq.Context() as context, context.socket(zmq.PAIR) as sender, context.socket(zmq.PAIR) as receiver:
        sender.bind("inproc://background")
        receiver.connect("inproc://background")
        sender.send(bytes(1 << 20), copy=False)
        receiver.recv()
        found = [thread.name for thread in threading.enumerate() if type(thread).__module__ == "zmq.utils.garbage"]
        assert found
        assert not set(found) & set(user_threads())


def test_files_are_attributed_to_user_or_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    assert library_of(torch.__file__) == "torch"
    assert library_of(threading.__file__) == "Python"
    assert library_of(user_threads.__code__.co_filename) == "axon_nb"
    assert library_of(str(tmp_path / "train.py")) == ""
    packages = "/usr/lib/python3/dist-packages", "/home/me/.local/lib/python3.11/site-packages"
    assert [library_of(f"{folder}/yaml/nodes.py") for folder in packages] == ["yaml", "yaml"]
    # As `pip install --target` leaves a folder, with the user's own files beside the packages.
    (record := tmp_path / "modules" / "tool-1.0.dist-info" / "RECORD").parent.mkdir(parents=True)
    record.write_text("tool/__init__.py,sha256=x,0\nsingle.py,sha256=x,0\ntool-1.0.dist-info/RECORD,,\n")
    monkeypatch.syspath_prepend(str(tmp_path / "modules"))
    files = "tool/core/base.py", "single.py", "train.py", "project/train.py"
    assert [library_of(str(tmp_path / "modules" / file)) for file in files] == ["tool", "single", "", ""]
