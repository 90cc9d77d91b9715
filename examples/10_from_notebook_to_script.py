# ---
# jupyter:
#   jupytext:
#     formats: ipynb,py:percent
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown]
# # From notebook to script
#
# Use notebooks to explore; put long runs in a script that `torchrun` starts. This notebook trains a small network on
# two ranks, tries a few dead ends, and then writes what matters as a script, with one command.

# %%
# %load_ext axon_nb
# %distributed start -n 2

# %% [markdown]
# ## Data in
#
# Plain cells run in the notebook. `%push` copies variables to every rank; `%scatter` splits them into parts of equal
# size. On one computer they go through shared memory: the ranks map the same pages, and a rank that writes to its array
# gets its own copy of the pages that it touches.

# %%
from importlib.util import find_spec

import axon_nb

if not find_spec("sklearn"):
    raise axon_nb.UsageError("This notebook needs scikit-learn. Run `%pip install scikit-learn`, then this cell again.")

# %%
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

digits = load_digits()
pixels = (digits.data / 16).astype("float32")
train_x, test_x, train_y, test_y = train_test_split(
    pixels, digits.target, test_size=0.2, stratify=digits.target, random_state=0
)
learning_rate, hidden = 0.1, 64

# %%
# %push train_x train_y learning_rate hidden
# %scatter test_x test_y

# %% [markdown]
# ## Explore
#
# Not every cell of an exploration matters in the end. This one only looks:

# %%
# %%distributed
print(f"rank {rank} has {len(train_x)} digits to train on and {len(test_x)} to test on")

# %%
# %%distributed
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

torch.manual_seed(0)
model = DistributedDataParallel(nn.Sequential(nn.Linear(64, hidden), nn.ReLU(), nn.Linear(hidden, 10)).to(device))
optimizer = torch.optim.SGD(model.parameters(), lr=learning_rate, momentum=0.9)
data = TensorDataset(torch.tensor(train_x, device=device), torch.tensor(train_y, device=device))
sampler = DistributedSampler(data)
loader = DataLoader(data, batch_size=32, sampler=sampler)

# %% [markdown]
# A failed cell has often done something before it failed. Here it has defined `factors`, which later cells use.

# %% tags=["raises-exception"]
# %%distributed
factors = {0: 1.0}
factor = factors[rank]

# %%
# %%distributed --ranks 1
factors[1] = 1.0

# %%
# %%distributed
losses = []
for epoch in range(3):
    sampler.set_epoch(epoch)
    for x, y in loader:
        loss = F.cross_entropy(model(x), y) * factors.get(rank, 1.0)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
if rank == 0:
    print("loss:", repr(losses[0]), "to", repr(losses[-1]))

# %% [markdown]
# ## Results back
#
# `%pull` fetches a variable from one rank, or from all ranks as a dictionary. `%gather` concatenates the parts, so the
# guesses are in the order in which `%scatter` distributed the digits.

# %%
# %%distributed
with torch.no_grad():
    guesses = model.module(torch.tensor(test_x, device=device)).argmax(dim=1).cpu()
right = (guesses == torch.tensor(test_y, device="cpu")).sum().item()
hits = torch.tensor([right, len(test_y)], device=device)
dist.all_reduce(hits)
if rank == 0:
    print(f"{hits[0].item()} of {hits[1].item()} test digits are right")

# %%
# %pull losses --ranks 0
# %gather guesses --numpy
right = float((guesses == test_y).mean())
print(f"{len(losses)} steps, {right:.1%} right")

# %% [markdown]
# ## The script
#
# `%distributed export` writes the `%%distributed` cells that ran, in order: with group set-up and teardown around them.
# Cells that ran on some ranks are under an `if`. Pushed numbers become command-line options, and arrays go into a file
# beside the script. The script keeps what the failed cell did before it failed. `--live-only` leaves out code that
# nothing later depends on.

# %%
import tempfile
from pathlib import Path

folder = Path(tempfile.mkdtemp())
script = folder / "train.py"
# %distributed export {script} --live-only
print(script.read_text())

# %% [markdown]
# ## The same losses, to the last digit
#
# The script uses the same number of threads as the notebook's ranks (torchrun would give each process one), so sums are
# computed in the same order.

# %%
import subprocess
import sys

command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
run = subprocess.run(command, capture_output=True, text=True, check=True)
print(run.stdout)
assert f"{losses[0]!r} to {losses[-1]!r}" in run.stdout

# %% [markdown]
# Command-line options change what was pushed: `torchrun --nproc-per-node 2 train.py --learning-rate 0.05`. You can
# export a saved notebook without running it: `axon-nb export notebook.ipynb train.py`.

# %%
import shutil

shutil.rmtree(folder)
# %distributed stop
