"""Threads can read gradients while a rank trains, and reading them never crashes the process."""

from __future__ import annotations

import subprocess
import sys

TRAIN = """
import threading, time, types
import torch
from torch import nn
from axon_nb.engine.inspection.memory import GradientReader

state = types.SimpleNamespace(cell=0)
gradients = GradientReader(state)
torch.set_num_threads(1)
model = nn.Sequential(*[part for _ in range(8) for part in (nn.Linear(64, 64), nn.ReLU())])
parameters, seen, over = list(model.parameters()), set(), threading.Event()
main, looks = threading.main_thread(), [0]

def count(found):
    assert threading.current_thread() is main or state.cell is None
    return sum(gradient is not None for gradient in found)

def look():
    while not over.wait(0.0005):
        seen.add(gradients.read("all", parameters, count, default=-1))
        looks[0] += 1

def wait_for_a_look():
    position = looks[0]  # two more have ended: the second has begun after now
    while looks[0] < position + 2:
        time.sleep(0.001)

gradients._jobs.append(lambda: None)  # which the main thread never comes to
first = threading.Thread(target=lambda: seen.add(gradients.read("all", parameters, count, default=-1)))
first.start()
first.join()
assert seen == {-1}
gradients._jobs.clear()
looking = threading.Thread(target=look)
looking.start()
optimizer, x, steps = torch.optim.Adam(parameters), torch.randn(8, 64), 0
while steps < 200 or 16 not in seen:
    optimizer.zero_grad()
    model(x).square().mean().backward()
    optimizer.step()
    steps += 1
state.cell = None
wait_for_a_look()  # the one before may still tell what was
seen.clear()
wait_for_a_look()
over.set()
looking.join()
print(sorted(seen))
"""


def test_reading_gradients_during_backward_is_safe() -> None:
    """Read without care, `.grad` ends this process within a second or two (torch 2.13)."""
    done = subprocess.run([sys.executable, "-c", TRAIN], capture_output=True, text=True, timeout=150, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "[16]\n"


INTERRUPTED = """
import os, signal, threading, types
from axon_nb.engine.inspection.memory import GradientReader

state = types.SimpleNamespace(cell=0)
gradients = GradientReader(state)
main, landed, heard = threading.main_thread(), [], 0

def on_interrupt(number, frame):
    if gradients.defers_interrupt(frame):
        landed.append(frame)
    else:
        raise KeyboardInterrupt

def make(found):
    assert threading.current_thread() is main
    os.kill(os.getpid(), signal.SIGINT)
    return sum(range(100))

signal.signal(signal.SIGINT, on_interrupt)
def ask(number):
    while len(begun) <= number:
        pass
    gradients.read(number, [], make, default=None)

begun = []
for number in range(30):
    asking = threading.Thread(target=ask, args=(number,))
    asking.start()
    try:
        begun.append(number)
        while True:
            pass
    except KeyboardInterrupt:
        heard += 1
    asking.join()
print(heard, len(landed))
"""


def test_interrupt_during_inspection_is_not_lost() -> None:
    done = subprocess.run([sys.executable, "-c", INTERRUPTED], capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "30 30\n", done.stderr
    assert "ignored" not in done.stderr
