"""What threads do while a rank is looked at: their frames, and who started them."""

from __future__ import annotations

import gc
import os
import queue
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import zmq
from torch.utils.data import DataLoader

from axon_nb.engine.frames import gc_paused, main_frame
from axon_nb.engine.kernel.control import user_threads
from axon_nb.records.stacks import library_of
from axon_nb.shell import inner_function

LOOKS = 2000
# Before Python 3.12 this ends at once where garbage may be collected while frames are looked at.
SCRIPT = f"""
import faulthandler, gc, sys, threading, time, types, weakref
from axon_nb.engine import frames

class Ring:
    def __init__(self): self.me = self

def called(_):
    time.sleep(0)  # gives Python's lock to the main thread

kept = []

def current_frames():
    gc.set_threshold(0)
    sys._getframe()  # the object of this frame is there
    kept[:] = [weakref.ref(Ring(), called) for _ in range(3)]
    gc.set_threshold(1)
    return sys._current_frames()  # to make the object of the main thread's frame collects them, if anything may

frames.sys = types.SimpleNamespace(_current_frames=current_frames)

def look():
    for _ in range({LOOKS}):
        frame = frames.main_frame()
        while frame is not None:
            frame = frame.f_back

def work(depth):
    return work(depth - 1) + work(depth - 1) if depth else 1

faulthandler.enable()
sys.setswitchinterval(1e-6)
looking = threading.Thread(target=look)
looking.start()
while looking.is_alive():
    work(6)
print("all is well")
"""


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


def test_frames_may_return_during_inspection() -> None:
    ran = subprocess.run([sys.executable, "-c", SCRIPT], check=False, capture_output=True, text=True, timeout=300)
    assert (ran.returncode, ran.stdout) == (0, "all is well\n"), ran.stderr


def test_frame_is_the_main_threads_on_any_thread() -> None:
    found = []
    thread = threading.Thread(target=lambda: found.append(main_frame()))
    thread.start()
    thread.join()
    names = []
    frame = found[0]
    while frame is not None:
        names.append(frame.f_code.co_name)
        frame = frame.f_back
    assert "test_frame_is_the_main_threads_on_any_thread" in names
    own = main_frame()
    assert own is not None
    assert own.f_code.co_name == "main_frame"


def test_garbage_collection_state_is_restored() -> None:
    seen: list[bool] = []

    def look() -> None:
        with gc_paused(), gc_paused():
            seen.append(gc.isenabled())
        seen.append(gc.isenabled())

    for turn in (gc.disable, gc.enable):
        turn()
        thread = threading.Thread(target=look)
        thread.start()
        thread.join()
    is_left_alone = sys.version_info >= (3, 12)
    assert seen == [False, False, is_left_alone, True]


FORKED = """
import gc, os, threading
from axon_nb.engine.frames import gc_paused

def look():
    with gc_paused():
        inside.set()
        forked.wait(0.3)

inside, forked = threading.Event(), threading.Event()
thread = threading.Thread(target=look)
thread.start()
inside.wait(60)
child = os.fork()
if not child:
    print(gc.isenabled(), flush=True)
    os._exit(0)
forked.set()
thread.join()
os.waitpid(child, 0)
"""


def test_child_forked_during_inspection_collects_garbage() -> None:
    ran = subprocess.run([sys.executable, "-c", FORKED], check=False, capture_output=True, text=True, timeout=300)
    assert (ran.returncode, ran.stdout) == (0, "True\n"), ran.stderr


def test_library_that_calls_torch_for_the_cell_is_named() -> None:
    here, found = sys._getframe(), []
    torch_code: dict[str, Any] = {"look": lambda: found.append(inner_function(sys._getframe(1), here))}
    exec(compile("def barrier(_=0): return look() or 0", torch.__file__, "exec"), torch_code)
    np.apply_along_axis(torch_code["barrier"], 0, np.ones(1))
    torch_code["barrier"]()

    def evaluate() -> None:
        np.apply_along_axis(torch_code["barrier"], 0, np.ones(1))

    evaluate()
    assert found[:2] == [" (by numpy)", ""]
    assert found[2].startswith(" (evaluate, line ")
    assert found[2].endswith(", by numpy)")
