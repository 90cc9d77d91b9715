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
# A notebook is for finding out; a long run belongs in a script that `torchrun` starts. This notebook trains a small
# network on two ranks, tries things that lead nowhere, and then writes what is left as a script, with one command.

# %%
# %load_ext axon_nb
# %distributed start -n 2

# %% [markdown]
# ## Data in
#
# Plain cells run here in the notebook. `%push` copies variables to every rank, `%scatter` deals one out in parts of
# equal size. On one computer they go through shared memory: the ranks map the same pages, and a rank that writes to its
# array gets a copy of the pages that it touches.

# %%
from importlib.util import find_spec

import axon_nb

if not find_spec("sklearn"):
    raise axon_nb.UsageError(
        'This notebook needs scikit-learn. Run `%pip install "axon_nb[demo]"`, then this cell again.'
    )

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
# ## Finding out
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
model = DistributedDataParallel(nn.Sequential(nn.Linear(64, hidden), nn.ReLU(), nn.Linear(hidden, 10)))
optimizer = torch.optim.SGD(model.parameters(), lr=learning_rate, momentum=0.9)
data = TensorDataset(torch.tensor(train_x), torch.tensor(train_y))
sampler = DistributedSampler(data)
loader = DataLoader(data, batch_size=32, sampler=sampler)

# %% [markdown]
# A failed cell has often done something before it failed. Here `factors` is there afterwards, and later cells use it.

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
# `%pull` fetches a variable: of one rank, or of all as a dictionary. `%gather` joins the parts, so that the guesses are
# in the order in which `%scatter` dealt out the digits.

# %%
# %%distributed
with torch.no_grad():
    guesses = model.module(torch.tensor(test_x)).argmax(dim=1)
hits = torch.tensor([(guesses == torch.tensor(test_y)).sum(), len(test_y)])
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
# `%distributed export` writes the `%%distributed` cells that ran, in order: group set-up and teardown around them,
# cells of some ranks under an `if`, numbers that were pushed as options of the command line, arrays in a file beside
# it, and of the failed cell what it did before it failed. With `--live-only`, what nothing later depends on is left
# out.

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
# The script sets the number of threads that the ranks of the notebook have (torchrun would give each process one), so
# sums are made in the same order.

# %%
import subprocess
import sys

command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
run = subprocess.run(command, capture_output=True, text=True, check=True)
print(run.stdout)
assert f"{losses[0]!r} to {losses[-1]!r}" in run.stdout

# %% [markdown]
# Options of the command line change what was pushed: `torchrun --nproc-per-node 2 train.py --learning-rate 0.05`. A
# saved notebook is exported without running it: `axon-nb export notebook.ipynb train.py`.

# %%
import shutil

shutil.rmtree(folder)
# %distributed stop
