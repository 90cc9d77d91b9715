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
# Every rank has the full model and sees its own part of each batch; gradients are averaged while backward still runs.
# This notebook trains a small network for handwritten digits on two ranks and varies one thing at a time.

# %%
# %load_ext axon_nb
# %distributed start -n 2

# %% [markdown]
# ## Data
#
# Each rank loads all digits; the ranks differ in which of them they use. `DistributedSampler` assigns them, and
# `set_epoch` reshuffles in every epoch, in the same way on all ranks.

# %%
from importlib.util import find_spec

import axon_nb

if not find_spec("sklearn"):
    raise axon_nb.UsageError("This notebook needs scikit-learn. Run `%pip install scikit-learn`, then this cell again.")

# %%
# %%distributed
import time

from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from axon_nb.comm import GradSyncStrategy
from axon_nb.parallel import (
    BF16,
    DDP,
    FP16,
    PowerSGD,
    TopK,
    accumulating,
    load_checkpoint,
    reduce_metrics,
    save_on_main,
)

digits = load_digits()
order = torch.randperm(len(digits.target), generator=torch.Generator().manual_seed(0), device="cpu")
pixels = (torch.tensor(digits.data, dtype=torch.float32)[order] / 16).to(device)
labels = torch.tensor(digits.target)[order].to(device)
train = TensorDataset(pixels[:1440], labels[:1440])
sampler = DistributedSampler(train)
loader = DataLoader(train, batch_size=32, sampler=sampler)
print(f"rank {rank} sees {len(sampler)} of {len(train)} digits in {len(loader)} batches")

# %% [markdown]
# ## The loop
#
# `DDP(model)` is torch's DistributedDataParallel with a few checks: it accepts axon_nb's groups and worlds, names the
# parameter and the rank if models differ, and lets you choose when gradients are averaged. The mean of a *metric* over
# ranks must be weighted by the number of samples per rank; `reduce_metrics` does that in one small message.


# %%
# %%distributed
def fresh_model():
    torch.manual_seed(0)  # DDP sends rank 0's weights to all, so this only makes runs comparable
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10)).to(device)


@torch.no_grad()
def test_accuracy(model):
    mine = slice(1440 + rank, None, world_size)
    hits = (model(pixels[mine]).argmax(1) == labels[mine]).float()
    return reduce_metrics({"accuracy": hits.mean()}, weight=len(hits))["accuracy"]


def train_model(model, epochs=6, every=1, autocast=None):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    scaler = torch.amp.GradScaler(device.type, enabled=autocast is torch.float16)  # does nothing unless enabled
    history = []
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        seen, loss_sum = 0, 0.0
        for step, (x, y) in enumerate(loader):
            with accumulating(model, step, every, total=len(loader)) as last:
                with torch.autocast(device.type, dtype=autocast or torch.bfloat16, enabled=autocast is not None):
                    loss = nn.functional.cross_entropy(model(x).float(), y)
                scaler.scale(loss / every).backward()
            if last:
                scaler.step(optimizer)
                scaler.update()
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
# is DDP's `no_sync` around the others. An epoch of 23 batches leaves one over: `total` lets it complete its own update
# instead of leaking into the next epoch. Updates are fewer and larger now, so the accuracy changes by a few percent.

# %%
# %%distributed
model = DDP(fresh_model())
train_model(model, epochs=12, every=2)  # half as many updates per epoch
accuracy = test_accuracy(model)
if rank == 0:
    print(f"with 2 batches per update: {accuracy:.1%}")

# %% [markdown]
# ## Mixed precision
#
# `torch.autocast` works as it does on one process. bfloat16 needs no scaler. float16 does, because small gradients
# would become zero: `torch.amp.GradScaler` multiplies the loss, and skips a step if a gradient overflows. All ranks
# skip the same steps, because gradients are averaged before they are checked.

# %%
# %%distributed
for dtype in (torch.bfloat16, torch.float16):
    model = DDP(fresh_model())
    train_model(model, autocast=dtype)
    accuracy = test_accuracy(model)
    if rank == 0:
        print(f"with {dtype} autocast: {accuracy:.1%}")

# %% [markdown]
# ## Activation checkpointing
#
# Backward needs what forward has computed. `torch.utils.checkpoint` keeps only the input of a part of the model and
# recomputes the rest. This trades time for memory; the gradients are the same, here to the last bit.

# %%
# %%distributed
from torch.utils.checkpoint import checkpoint


class Thrifty(nn.Module):
    """Keeps none of the inner activations."""

    def __init__(self, layers):
        super().__init__()
        self.layers = layers

    def forward(self, x):
        return checkpoint(self.layers, x, use_reentrant=False)


def gradients(model):
    nn.functional.cross_entropy(model(pixels[rank:64:world_size]), labels[rank:64:world_size]).backward()
    return [parameter.grad for parameter in model.parameters()]


pairs = zip(gradients(DDP(fresh_model())), gradients(DDP(Thrifty(fresh_model()))), strict=True)
print("the same gradients:", all(torch.equal(plain, thrifty) for plain, thrifty in pairs))

# %% [markdown]
# ## Save and load
#
# One rank writes, and the others wait until the file exists. If it cannot be written, every rank raises the reason
# instead of waiting. `model.module` is the model without its wrapper, with the parameter names of a single process.

# %%
# %%distributed
import tempfile
from pathlib import Path

path = Path(tempfile.gettempdir()) / f"digits_{dist.get_world_size()}_ranks.pt"
save_on_main({"model": model.module.state_dict(), "accuracy": accuracy}, path)

saved = load_checkpoint(path)
restored = fresh_model()
restored.load_state_dict(saved["model"])
print(f"saved {saved['accuracy']:.1%}, loaded {test_accuracy(restored):.1%}")
dist.barrier()  # all have read it
if rank == 0:
    path.unlink()

# %% [markdown]
# ## Compression
#
# On slow links, a step waits for the bytes of the gradients. A communication hook replaces the plain average. Each hook
# counts what it sends; with `measure=True` it also compares its result with the exact one.
#
# - `FP16` and `BF16` send half precision: half the bytes.
# - `TopK` sends the largest few percent and keeps the rest for later (*error feedback*).
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
            "bytes sent": hook.stats.bytes_sent
            if hook
            else sum(p.nbytes for p in model.parameters()) * 6 * len(loader),
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
    }
).hide(axis="index")

# %% [markdown]
# The large relative error of `TopK` is expected: in a single step most of the gradient is held back. It arrives later,
# so training still converges. On one computer compression saves no time, because memory is faster than compressing;
# across slow links the share of bytes is what counts.

# %%
# %distributed stop
