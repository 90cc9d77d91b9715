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
# # Nothing is lost: dead ranks, bad cells, several learning rates
#
# A model on a 2 × 2 mesh: its layers are split over two ranks by tensor parallelism, and each part is sharded over two
# data-parallel ranks by FSDP2. Each of the four ranks holds a quarter of the weights, and no other rank has it. Kill
# one within a step, and repair: the training ends with the losses of a run that nothing disturbed, to the
# last digit.

# %%
# %load_ext axon_nb
# %distributed start -n 4
# %distributed config protect=on undo_memory=256MiB

# %% [markdown]
# ## A model in quarters

# %%
# %%distributed
import os
import signal

from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import axon_nb
from axon_nb.parallel import make_mesh

mesh = make_mesh(dp=2, tp=2)


def begin():
    """The model, its optimizer, and no losses yet; the same on each call."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32), nn.LayerNorm(32)).to(device)
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    fully_shard(model, mesh=mesh["dp"])
    torch.manual_seed(1 + mesh["dp"].get_local_rank())  # the ranks of a tensor-parallel pair see the same batches
    return model, torch.optim.Adam(model.parameters(), lr=1e-2), []


def step(model, optimizer):
    inputs = torch.randn(16, 32, device=device)
    loss = (model(inputs) - inputs.roll(1, dims=1)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


model, optimizer, losses = begin()
while len(losses) < 30:
    losses.append(step(model, optimizer))
undisturbed = losses
if rank == 0:
    print(f"after 30 steps: {losses[-1]:.6f}")

# %% [markdown]
# ## A rank dies
#
# Again, from the start. In step 20, rank 3 kills itself after its optimizer has changed the weights and before the step
# is over: as a crash in a kernel or a machine out of memory would.

# %%
# %%distributed
model, optimizer, losses = begin()
process = os.getpid()


def die(*_):
    if rank == 3 and len(losses) == 20 and os.getpid() == process:  # its replacement goes on
        os.kill(process, signal.SIGKILL)


_ = optimizer.register_step_post_hook(die)

# %% tags=["raises-exception"]
# %%distributed
while len(losses) < 30:
    losses.append(step(model, optimizer))

# %%
# %distributed repair

# %%
# %%distributed
while len(losses) < 30:
    losses.append(step(model, optimizer))
print("the same losses, to the last digit:", losses == undisturbed)

# %% [markdown]
# `repair` forked a process for rank 3 and gave it that rank's quarter of the weights and moments, the state of its
# random generators, and its variables, from memory that outlives the rank. All ranks went back to the last step that
# all had finished, and repeated what came after.
#
# ## A cell goes wrong
#
# A learning rate of 10 ruins the weights, the moments and the list of losses. `%distributed undo` takes the cell back:

# %%
# %%distributed
for group in optimizer.param_groups:
    group["lr"] = 10.0
for _ in range(5):
    losses.append(step(model, optimizer))
if rank == 0:
    print(f"after a learning rate of 10: {losses[-1]:.6f}")

# %%
# %distributed undo

# %%
# %%distributed
print("the losses are as before:", losses == undisturbed)

# %% [markdown]
# ## Which learning rate?
#
# Three runs from the same state, and the best one is kept. Each starts with the same weights, moments and random
# numbers; the table shows what `axon_nb.log` reported.

# %%
# %%distributed --branch lr=3e-2,1e-2,1e-3 --keep best:loss
for group in optimizer.param_groups:
    group["lr"] = lr
for number in range(20):
    losses.append(step(model, optimizer))
    axon_nb.log(loss=losses[-1], step=number)

# %%
# %%distributed
if rank == 0:
    print(f"{len(losses)} steps, the last with lr = {lr}: {losses[-1]:.6f}")

# %%
# %distributed status

# %%
# %distributed stop
