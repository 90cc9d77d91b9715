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
# # Data parallelism: samplers, accumulation, mixed precision, compression
#
# Every rank has the whole model and sees its own part of each batch; gradients are averaged while backward still runs.
# This notebook trains a small network on handwritten digits on two ranks and varies one thing at a time.

# %%
# %load_ext axon_nb
# %distributed start -n 2

# %% [markdown]
# ## Data
#
# Each rank loads the digits for itself; what differs is which of them it sees. `DistributedSampler` deals them out, and
# `set_epoch` shuffles anew in every epoch, in the same way on all ranks.

# %%
# %%distributed
import time

from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from axon_nb.comm import GradSyncStrategy
from axon_nb.parallel import BF16, DDP, FP16, PowerSGD, TopK, accumulating, reduce_metrics

digits = load_digits()
order = torch.randperm(len(digits.target), generator=torch.Generator().manual_seed(0))
pixels = torch.tensor(digits.data, dtype=torch.float32)[order] / 16
labels = torch.tensor(digits.target)[order]
train = TensorDataset(pixels[:1440], labels[:1440])
sampler = DistributedSampler(train)
loader = DataLoader(train, batch_size=32, sampler=sampler)
print(f"rank {rank} sees {len(sampler)} of {len(train)} digits in {len(loader)} batches")

# %% [markdown]
# ## The loop
#
# `DDP(model)` is torch's DistributedDataParallel with a few checks: it takes our groups and worlds, names the parameter
# and the rank when models differ, and has a strategy for when gradients are averaged. The mean over ranks of a *metric*
# has to be weighted by how many samples each rank has; `reduce_metrics` does that in one small message.


# %%
# %%distributed
def fresh_model():
    torch.manual_seed(0)  # DDP sends rank 0's weights to all, so this only makes runs comparable
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))


@torch.no_grad()
def test_accuracy(model):
    mine = slice(1440 + rank, None, world_size)
    hits = (model(pixels[mine]).argmax(1) == labels[mine]).float()
    return reduce_metrics({"accuracy": hits.mean()}, weight=len(hits))["accuracy"]


def train_model(model, epochs=6, every=1, autocast=None):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    history = []
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        seen, loss_sum = 0, 0.0
        for step, (x, y) in enumerate(loader):
            with accumulating(model, step, every, total=len(loader)) as last:
                with torch.autocast("cpu", dtype=autocast or torch.bfloat16, enabled=autocast is not None):
                    loss = nn.functional.cross_entropy(model(x).float(), y)
                (loss / every).backward()
            if last:
                optimizer.step()
                optimizer.zero_grad()
            seen, loss_sum = seen + len(x), loss_sum + loss.item() * len(x)
        history.append(reduce_metrics({"loss": loss_sum / seen}, weight=seen)["loss"])
    return history


model = DDP(fresh_model())
history = train_model(model)
accuracy = test_accuracy(model)
if rank == 0:
    print("loss by epoch:", " ".join(f"{value:.3f}" for value in history))
    print(f"{accuracy:.1%} of the test digits are right")

# %% [markdown]
# ## Gradient accumulation
#
# A batch that does not fit can be computed in pieces. Only the last piece of each update communicates: `accumulating`
# is DDP's `no_sync` around the others.

# %%
# %%distributed
model = DDP(fresh_model())
train_model(model, epochs=12, every=2)  # half as many updates an epoch
accuracy = test_accuracy(model)
if rank == 0:
    print(f"with 2 batches an update: {accuracy:.1%}")

# %% [markdown]
# ## Mixed precision
#
# `torch.autocast` works as it does on one process. bfloat16 needs no scaler; with float16, `torch.amp.GradScaler`
# skips a step on all ranks when one of them overflows, as gradients are averaged before they are looked at.

# %%
# %%distributed
model = DDP(fresh_model())
train_model(model, autocast=torch.bfloat16)
accuracy = test_accuracy(model)
if rank == 0:
    print(f"with bfloat16 autocast: {accuracy:.1%}")

# %% [markdown]
# ## Compression
#
# On slow links the bytes of the gradients are what a step waits for. A communication hook replaces the plain average.
# Each of ours counts what it sends; with `measure=True` it also compares its result with the exact one.
#
# - `FP16` and `BF16` round on the way: half the bytes.
# - `TopK` sends the largest few per cent and keeps the rest for later (*error feedback*).
# - `PowerSGD` sends each gradient matrix as a product of two thin ones.

# %%
# %%distributed --quiet --out compared
hooks = {
    "none": None,
    "FP16": lambda: FP16(measure=True),
    "BF16": lambda: BF16(measure=True),
    "TopK 10 %": lambda: TopK(0.1, measure=True),
    "TopK 1 %": lambda: TopK(0.01, measure=True),
    "PowerSGD rank 4": lambda: PowerSGD(4, measure=True),
}
rows = []
for name, make in hooks.items():
    model = DDP(fresh_model(), strategy=GradSyncStrategy.SYNCHRONOUS)
    hook = model.register_hook(make()) if make else None
    start = time.perf_counter()
    train_model(model)
    seconds = time.perf_counter() - start
    rows.append(
        {
            "hook": name,
            "bytes sent": hook.stats.bytes_sent if hook else None,
            "share": hook.stats.ratio if hook else 1.0,
            "relative error": hook.stats.error if hook else 0.0,
            "test accuracy": test_accuracy(model),
            "seconds": seconds,
        }
    )
rows

# %%
import pandas as pd

pd.DataFrame(compared[0]).style.format(
    {
        "bytes sent": "{:,.0f}",
        "share": "{:.1%}",
        "relative error": "{:.2g}",
        "test accuracy": "{:.1%}",
        "seconds": "{:.1f}",
    },
    na_rep="all",
).hide(axis="index")

# %% [markdown]
# A large relative error of `TopK` is no mistake: in a single step most of the gradient stays behind. It arrives later,
# which is why training gets there all the same. On one computer nothing is gained in time, as memory is faster than
# compressing; across slow links the share of bytes is what counts.

# %%
# %distributed stop
