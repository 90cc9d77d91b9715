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
# # Two GPUs on Kaggle
#
# Kaggle lends a notebook two T4s. A plain cell uses one of them; here one model is sharded over both. The same notebook
# runs on two CPU ranks where there are no GPUs.
#
# ## Install
#
# In the checkout, `pip wheel --no-deps -w dist .` makes a wheel. Add it to the notebook as a dataset, and run
# `%pip install /kaggle/input/*/axon_nb-*.whl` in its first cell. That keeps Kaggle's IPython, ipykernel and widgets.
#
# ## Start
#
# Choose the accelerator *GPU T4 x2* in the notebook's settings first.

# %%
# %load_ext axon_nb
# %distributed start -n 2

# %% [markdown]
# The table shows which device each rank has. If both say `cpu`, the session has no accelerator. With a single card,
# such as a P100, both ranks share it and communicate through the host's memory: everything below works, but more slowly
# than on one rank. `%distributed start -n 2 --devices cpu` leaves cards to other notebooks.

# %%
# %%distributed
name = torch.cuda.get_device_name(device) if device.type == "cuda" else "a CPU"
total = torch.ones(1, device=device)
dist.all_reduce(total)
print(f"{name}; the sum over all ranks is {total.item():.0f}")

# %% [markdown]
# ## One model on both
#
# torch's `fully_shard` keeps half of each parameter on each card, and gathers one block at a time. In float32 with Adam
# a model takes 16 bytes per parameter: two T4s together hold one of twice the size. They have no fast link and exchange
# data through the host, so larger batches pay: fewer bytes per sample.

# %%
# %%distributed
import time

from torch.distributed.fsdp import fully_shard

from axon_nb.parallel.models import GPT, GPTConfig, next_byte_loss, standard_library, windows

config = GPTConfig(context=64, hidden=64, heads=4, blocks=4)
text = standard_library(1 << 20)
torch.manual_seed(0)
model = GPT(config).to(device)
for child in model.children():
    fully_shard(child)
fully_shard(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
generator = torch.Generator().manual_seed(100 + rank)  # each rank reads other text


def step():
    inputs, targets = windows(text, batch=8, seq=config.context, generator=generator, device=device)
    loss = next_byte_loss(model(inputs), targets)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


# %%
# %%distributed
begin, losses = time.perf_counter(), []
for number in range(60):
    loss = step()
    dist.all_reduce(loss, op=dist.ReduceOp.SUM)
    losses.append(loss.item() / world_size)
    if rank == 0 and number % 20 == 19:
        print(
            f"step {number + 1}: loss {losses[-1]:.2f}, {(time.perf_counter() - begin) / len(losses) * 1e3:.0f} ms each"
        )

# %% [markdown]
# ## Who holds what

# %%
# %shards model

# %%
# %memory model optimizer

# %% [markdown]
# ## When a cell fails
#
# The model and the other rank are kept: correct the cell and go on.

# %% tags=["raises-exception"]
# %%distributed
print(torch.zeros(2, device=device) @ torch.zeros(3, device=device))

# %%
# %%distributed
print(f"loss {step().item():.2f}")

# %% [markdown]
# ## Save, or take it along
#
# *Save & Run All* runs the notebook again without a browser, and stops at a cell that fails: remove the one above.
# Views are saved as pictures. The same training as a script for `torchrun --nproc-per-node 2`:

# %%
# %distributed export /tmp/two_gpus.py --force

# %%
# %distributed stop
