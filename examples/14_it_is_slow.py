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
# # It is slow: what to change, and what it would gain
#
# A loop on three ranks takes longer than it should. Which part of it costs most, and is it worth to change it? Record
# some steps, ask for advice, follow it, and compare. At the end, make a rank and a link slow on purpose, to see what
# a straggler and a network cost.

# %%
# %load_ext axon_nb
# %distributed start -n 3
# %timeline

# %% [markdown]
# ## A loop with three mistakes
#
# The data is loaded in the step, one rank does more than the others, and gradients are summed after each of two
# backwards, though only the last sum is needed.

# %%
# %%distributed
import time
from contextlib import nullcontext

from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


class Examples(torch.utils.data.Dataset):
    """Rows that take a while to read."""

    def __len__(self):
        return 256

    def __getitem__(self, number):
        time.sleep(0.002)
        return torch.full((256,), number / 256, device="cpu")


def train(steps=8, reads_ahead=False, logs=True, sums_once=False):
    """Train for some steps; return the mean seconds of one, without the first two."""
    torch.manual_seed(0)
    model = DDP(nn.Sequential(nn.Linear(256, 256), nn.GELU(), nn.Linear(256, 1)).to(device))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    ahead = {"num_workers": 1, "persistent_workers": True} if reads_ahead else {}
    batches = iter(torch.utils.data.DataLoader(Examples(), batch_size=16, **ahead))
    for step in range(steps):
        batch = next(batches)
        for part in range(2):
            with model.no_sync() if sums_once and part == 0 else nullcontext():
                model(batch.to(device)).square().mean().backward()
        if logs and rank == 2:
            time.sleep(0.1)  # such as a file that this rank writes
        optimizer.step()
        optimizer.zero_grad()
        if step == 1:
            dist.barrier()
            start = time.monotonic()
    dist.barrier()
    return (time.monotonic() - start) / (steps - 2)


slow = train()

# %% [markdown]
# `--advise` replays the recorded steps with one part changed, and lists what would make a step at least 5 % shorter.

# %%
# %timeline --advise

# %% [markdown]
# ## Follow it
#
# Rank 2 no longer writes in the step, and a process reads the data ahead.

# %%
# %%distributed
fast = train(reads_ahead=True, logs=False)
if rank == 0:
    print(f"a step takes {1 - fast / slow:.0%} less")

# %%
# %timeline --advise

# %% [markdown]
# ## A slow network, on a laptop
#
# Over shared memory, gradients are summed in no time. Over a link of 100 Mbit/s, the two sums per step cost: the first
# line of each cell says what is slowed, and so does the timeline.

# %%
# %distributed slow --all-links --mbit 100 --latency 5ms

# %%
# %%distributed
far = train(reads_ahead=True, logs=False)

# %%
# %timeline --advise

# %% [markdown]
# One of the sums is not needed: `no_sync` leaves it out.

# %%
# %%distributed
summed_once = train(reads_ahead=True, logs=False, sums_once=True)
if rank == 0:
    print(f"a step takes {1 - summed_once / far:.0%} less")

# %% [markdown]
# ## A slow rank
#
# Rank 1 computes a tenth as fast; the others wait for it in each sum, and the timeline names it.

# %%
# %distributed slow off
# %distributed slow --ranks 1 --factor 10

# %%
# %%distributed
hindered = train(reads_ahead=True, logs=False)

# %%
# %timeline --advise

# %%
# %distributed slow off

# %%
# %distributed stop
