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
# # Quickstart: train on four ranks from one notebook
#
# A *rank* is a Python process that takes part in a distributed run. Usually ranks live in a script that `torchrun`
# starts: they begin together, run to the end, and are gone. Here they stay. A cell that starts with `%%distributed`
# runs on every rank at once, and each rank keeps its variables for the next cell, just as this notebook does.
#
# No GPU is needed. The whole notebook takes about a minute on a laptop.

# %%
# %load_ext axon_nb

# %% [markdown]
# ## Start the ranks
#
# This starts four processes that are already joined in one `torch.distributed` group. Ranks with a GPU
# each communicate over NCCL, ranks on the CPUs of one host through shared memory, and all others over Gloo.

# %%
# %distributed start -n 4

# %% [markdown]
# The same code runs everywhere; only `rank` differs. Some names are predefined: `rank`, `local_rank`, `world_size`,
# `device`, `torch` and `dist` (which is `torch.distributed`).

# %%
# %%distributed
print(f"hello from rank {rank} of {world_size}, on {device}")

# %% [markdown]
# Ranks work together through *collectives*. Each rank passes its own number to `all_reduce`, and each gets the sum.
# Output that is identical on all ranks is shown once.

# %%
# %%distributed
total = torch.tensor(rank + 1.0, device=device)
dist.all_reduce(total)
total.item()

# %% [markdown]
# ## Send the data to the ranks
#
# Cells without `%%distributed` run in the notebook, as usual. We load
# [1,797 handwritten digits](https://archive.ics.uci.edu/dataset/80) from a file beside this notebook, set a fifth of
# them aside for testing, and push the arrays to all ranks.

# %%
import numpy as np
import pandas as pd

digits = np.random.default_rng(0).permutation(pd.read_csv("data/digits.csv.gz", header=None).to_numpy())
images = (digits[:, :64] / 16).astype("float32").reshape(-1, 1, 8, 8)  # digits × 1 channel × 8 × 8 pixels, 0 to 1
labels = digits[:, 64]
train_x, test_x, train_y, test_y = images[:-360], images[-360:], labels[:-360], labels[-360:]

# %%
# %push train_x train_y test_x test_y

# %% [markdown]
# ## A model on every rank
#
# This is plain PyTorch, as you would write it in a script, but without the lines that set up the process group. Each
# rank holds a copy of the model; `DistributedDataParallel` averages the gradients, so that the copies stay equal.
# `DistributedSampler` gives each rank a quarter of the images.

# %%
# %%distributed
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

torch.manual_seed(0)
model = nn.Sequential(
    nn.Conv2d(1, 32, kernel_size=3, padding=1),
    nn.ReLU(),
    nn.Conv2d(32, 64, kernel_size=3, padding=1),
    nn.ReLU(),
    nn.MaxPool2d(2),
    nn.Flatten(),
    nn.Dropout(0.25),
    nn.Linear(64 * 4 * 4, 64),
    nn.ReLU(),
    nn.Linear(64, 10),
).to(device)
ddp = DistributedDataParallel(model)
torch.manual_seed(rank)  # the same weights everywhere, and from here dropout masks of its own on each rank

data = TensorDataset(torch.tensor(train_x, device="cpu"), torch.tensor(train_y, device="cpu"))
sampler = DistributedSampler(data)
loader = DataLoader(data, batch_size=16, sampler=sampler)
optimizer = torch.optim.AdamW(ddp.parameters(), lr=3e-3)
print(f"{len(sampler)} of {len(data)} images, {len(loader)} steps per epoch")

# %% [markdown]
# ## Train
#
# `--watch` shows what each rank does while the cell runs. A loss belongs to one rank's quarter of the batch; to report
# the loss of the whole batch, it must be reduced over the ranks first.

# %%
# %%distributed --watch
losses = []
for epoch in range(12):
    sampler.set_epoch(epoch)  # a new order in each epoch, the same one on all ranks
    for x, y in loader:
        loss = F.cross_entropy(ddp(x.to(device)), y.to(device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    mean_loss = torch.tensor(losses[-len(loader) :], device=device).mean()
    dist.all_reduce(mean_loss)  # every rank must take part, though only rank 0 prints
    if rank == 0:
        print(f"epoch {epoch + 1:2}: loss {mean_loss.item() / world_size:.3f}")

# %% [markdown]
# ## Test
#
# Accuracy is reduced in the same way: each rank counts the correct guesses in its share of the test digits, and the
# counts are summed. (Averaging four percentages would be wrong if the shares differed in size.)

# %%
# %%distributed
ddp.eval()
share = slice(rank, None, world_size)
with torch.no_grad():
    guesses = model(torch.tensor(test_x[share], device=device)).argmax(dim=1)
hits = (guesses == torch.tensor(test_y[share], device=device)).sum().item()

score = torch.tensor([hits, len(guesses)], device=device)
dist.all_reduce(score)
accuracy = score[0].item() / score[1].item()
assert accuracy > 0.95, f"only {accuracy:.1%} of the test digits"
print(f"{accuracy:.1%} of {score[1]} test digits are right")

# %% [markdown]
# ## Bring results back
#
# `%pull` copies a variable into the notebook. With `--ranks 0` it is rank 0's value; without it, a dictionary from rank
# to value.

# %%
# %pull losses --ranks 0
losses[-3:]

# %%
by_epoch = np.reshape(losses, (12, -1)).mean(axis=1)
table = pd.DataFrame({"mean loss of rank 0": by_epoch}, index=range(1, 13))
table.style.format("{:.3f}").bar(color="#3b82f680", vmin=0, width=80)

# %% [markdown]
# ## Some ranks only
#
# `--ranks` runs a cell on some of the ranks, `%%rank` on one. The others do not take part, so such a cell must not call
# a collective that waits for all ranks.

# %%
# %%distributed --ranks 0,2
print(f"rank {rank} got {hits} of its {len(guesses)} test digits right")

# %%
# %%rank 0
sum(parameter.numel() for parameter in model.parameters())

# %% [markdown]
# ## When a rank fails
#
# In a script, an error on one rank leaves the others waiting in their next collective until a timeout ends the run.
# Here the cell ends at once and names the rank and the line. The next cell fails on purpose: rank 2 has no weight in
# the table, while the others wait for it in `all_reduce`.

# %% tags=["raises-exception"]
# %%distributed
weights = {0: 0.1, 1: 0.2, 3: 0.4}
weight = torch.tensor(weights[rank], device=device)
dist.all_reduce(weight)

# %% [markdown]
# Nothing is lost: variables, model and process group are intact, and the corrected cell runs.

# %%
# %%distributed
weights[2] = 0.3
weight = torch.tensor(weights[rank], device=device)
dist.all_reduce(weight)
print(f"the weights sum to {weight.item():.1f}, and the model is still {accuracy:.1%} right")

# %% [markdown]
# ## Stop
#
# Shutting the notebook down stops the ranks as well.

# %%
# %distributed stop
