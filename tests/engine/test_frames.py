"""Looking at the main thread's frames from another thread, with garbage that lets the main thread go on meanwhile."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
from typing import Any

import numpy as np
import torch

from axon_nb.engine.frames import gc_paused, main_frame
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
