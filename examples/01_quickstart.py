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
# This starts four processes that are already joined in one `torch.distributed` group. With one GPU per rank it uses
# NCCL, otherwise Gloo.

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
# Cells without `%%distributed` run in the notebook, as usual. We load the 1,797 handwritten digits that come with
# scikit-learn, set a fifth of them aside for testing, and push the arrays to all ranks.

# %%
from importlib.util import find_spec

import axon_nb

if not (find_spec("sklearn") and find_spec("matplotlib")):
    raise axon_nb.UsageError(
        'This notebook needs scikit-learn and Matplotlib. Run `%pip install "axon_nb[demo]"`, then this cell again.'
    )

# %%
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

digits = load_digits()
images = (digits.images / 16).astype("float32")[:, None]  # digits × 1 channel × 8 × 8 pixels, from 0 to 1
train_x, test_x, train_y, test_y = train_test_split(
    images, digits.target, test_size=0.2, stratify=digits.target, random_state=0
)

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
print(f"{len(sampler)} of {len(data)} images, {len(loader)} steps an epoch")

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
import matplotlib.pyplot as plt
import pandas as pd

blue, grey = "#3b82f6", "#7a7a7a"  # readable on a light page and on a dark one
grey_parts = ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color")
with plt.rc_context({"figure.facecolor": "none", "axes.facecolor": "none", **dict.fromkeys(grey_parts, grey)}):
    fig, ax = plt.subplots(figsize=(7, 3), dpi=120, layout="constrained")
    smooth = pd.Series(losses).rolling(20, min_periods=1).mean()
    ax.plot(losses, color=blue, alpha=0.35, linewidth=1, label="each step")
    ax.plot(smooth, color=blue, linewidth=2, label="mean of 20 steps")
    ax.set(xlabel="step", ylabel="loss", title="Rank 0's loss in training")
    ax.spines[["top", "right"]].set_visible(False)
    ax.legend(frameon=False)
    plt.show()

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
