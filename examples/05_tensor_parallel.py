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
# # Tensor parallelism: one layer on several ranks
#
# Data parallelism gives every rank the full model. If a single layer is too large, its weight matrix can be sharded:
# each rank keeps a part, computes its share of the result, and a collective combines the shares. This notebook shards
# one small matrix by hand, then a GPT, and trains it on the source of Python's standard library.

# %%
# %load_ext axon_nb
# %distributed start -n 2

# %% [markdown]
# ## Two ways to split a matrix
#
# A linear layer computes `x @ W.T`. Split by *columns* (of `W.T`; these are the output features), every rank sees all
# of `x` and computes some of the features. Split by *rows*, every rank sees some of the input features and computes a
# part of every sum; an `all_reduce` adds the parts.

# %%
# %%distributed
from torch import nn

from axon_nb.parallel import ColumnParallelLinear, RowParallelLinear

whole = nn.Linear(4, 4, bias=False, device=device)
with torch.no_grad():
    whole.weight.copy_(torch.arange(16.0, device=device).view(4, 4))

column = ColumnParallelLinear.from_linear(whole)
row = RowParallelLinear.from_linear(whole)
print(f"by columns:\n{column.weight.data.int().cpu().numpy()}\nby rows:\n{row.weight.data.int().cpu().numpy()}")

# %% [markdown] The column layer gives each rank its own features, and nothing is sent. A row layer takes exactly such
# an input. So a column layer, an activation and a row layer make an MLP with a single collective, the sum at the end.
# Here it is next to the same two layers without sharding:

# %%
# %%distributed
x = torch.tensor([1.0, 0.0, 2.0, -1.0], device=device)
first = nn.Linear(4, 8, bias=False, device=device)
second = nn.Linear(8, 4, bias=False, device=device)
with torch.no_grad():
    for layer in (first, second):
        layer.weight.copy_(torch.linspace(-1, 1, 32, device=device).view(layer.weight.shape))

up = ColumnParallelLinear.from_linear(first)
down = RowParallelLinear.from_linear(second)
own = up(x)
total = down(own.relu())
print(f"rank {rank}: own features {own.detach().cpu().numpy().round(2)}, sum {total.detach().cpu().numpy().round(2)}")
print("in one piece:", second(first(x).relu()).detach().cpu().numpy().round(2))

# %% [markdown]
# Backward mirrors this: every rank gets the same gradient of the sum, and the ranks' partial gradients for `x` are
# summed. So the gradients equal those of the full layer:

# %%
# %%distributed
down(up(x).relu()).square().sum().backward()
second(first(x).relu()).square().sum().backward()
mine = slice(4 * rank, 4 * rank + 4)
print("the same gradients:", torch.allclose(up.weight.grad, first.weight.grad[mine], rtol=1e-5))

# %% [markdown]
# ## A whole model
#
# `parallelize` does this to an ordinary model, following a plan. `"auto"` knows the GPT of `axon_nb.parallel.models`:
# queries, keys and values by columns (each rank gets some of the heads), the output projection by rows; the same for
# the MLP. All ranks first get rank 0's weights, so their seeds do not matter. The report lists what was sharded and
# what was not.

# %%
# %%distributed
from axon_nb.parallel import parallelize
from axon_nb.parallel.models import GPT, GPTConfig, next_byte_loss, standard_library, windows

config = GPTConfig(context=64, hidden=128, heads=4, blocks=2)
torch.manual_seed(rank)
model = GPT(config).to(device)
report = parallelize(model, "auto")
if rank == 0:
    print(report)

# %% [markdown]
# ## Train it
#
# Every rank gets the same batch (it is one model, not copies of it) and computes the same loss. The text is the source
# of the standard library, byte by byte. An untrained model has a loss of ln 256 = 5.5.


# %%
# %%distributed
text = standard_library(1 << 19)


def train(model, loss_of, steps=60):
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    generator = torch.Generator().manual_seed(1)  # the same batches on all ranks
    losses = []
    for _ in range(steps):
        inputs, targets = windows(text, batch=8, seq=config.context, generator=generator, device=device)
        optimizer.zero_grad()
        loss = loss_of(model(inputs), targets)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


losses = train(model, next_byte_loss)
if rank == 0:
    print("loss every 10 steps:", " ".join(f"{value:.2f}" for value in [*losses[::10], losses[-1]]))

# %% [markdown]
# ## What is sent
#
# `axon_nb.calls()` counts the calls and bytes of a block; `sent` is what a ring would put on the wire. We count one
# step of this model: in forward each block reduces twice, after attention and after the MLP, and the logits are
# gathered. In backward each block reduces twice, for the inputs of attention and of the MLP, and the head once.

# %%
# %%distributed
import axon_nb

with axon_nb.calls() as plain:
    train(model, next_byte_loss, steps=1)
if rank == 0:
    print(plain)

# %% [markdown]
# ## Sequence and loss parallelism
#
# Between blocks, every rank still keeps the same activations. With `sequence=True` each rank has its own positions
# there: norms, residuals and all that they keep for backward are sharded as well, and each all_reduce becomes a
# reduce_scatter and an all_gather with the same bytes. With `parallel_loss=True` the logits stay sharded along the
# vocabulary, and `parallel_cross_entropy` exchanges two numbers per position instead of 256.

# %%
# %%distributed
from axon_nb.parallel import parallel_cross_entropy

torch.manual_seed(0)
thrifty = GPT(config)
report = parallelize(thrifty, "auto", sequence=True, parallel_loss=True)
thrifty_losses = train(thrifty, parallel_cross_entropy)
with axon_nb.calls() as sent:
    train(thrifty, parallel_cross_entropy, steps=1)
if rank == 0:
    print(f"loss {thrifty_losses[0]:.3f} -> {thrifty_losses[-1]:.3f}, and before {losses[0]:.3f} -> {losses[-1]:.3f}")
    print(f"plain:\n{plain}\nthrifty:\n{sent}")

# %% [markdown]
# ## Your own plan
#
# For other models a plan is a dictionary from patterns of module names to styles. A pattern that matches nothing is an
# error, and so are features or heads that do not divide evenly: nothing is silently dropped or skipped.

# %%
# %%distributed
plan = {
    "block*.attention.[qkv]*": "column",
    "block*.attention.out": "row",
    "block*.up": "column",
    "block*.down": "row",
}
report = parallelize(GPT(config), plan)
print(f"{report.local_bytes:,} of {report.total_bytes:,} bytes of parameters")

try:
    parallelize(GPT(config), {"layer*.up": "column"})
except Exception as error:
    print(f"{type(error).__name__}: {error}")

# %% [markdown]
# ## Save on two ranks, load on one
#
# Shards know their place in the full tensor, so a checkpoint loads on any number of ranks, including one. Here the
# sharded model is saved, and each rank loads it into a plain GPT on its own.

# %%
# %%distributed
import shutil
import tempfile
import warnings
from pathlib import Path

from axon_nb.comm import ProcessGroup
from axon_nb.parallel import Checkpoints, export_safetensors

folder = Path(tempfile.gettempdir()) / f"axon_nb_05_{world_size}_ranks"
Checkpoints(folder).save(60, model=thrifty)
export_safetensors(thrifty, folder / "gpt.safetensors")

alone = GPT(config)
with warnings.catch_warnings(action="ignore"):  # 1 rank intentionally loads what 2 ranks saved
    Checkpoints(folder, group=ProcessGroup.mock()).load(60, model=alone)
inputs, targets = windows(text, batch=8, seq=config.context, generator=torch.Generator().manual_seed(2), device=device)
with torch.no_grad():
    cut, one = parallel_cross_entropy(thrifty(inputs), targets), next_byte_loss(alone(inputs), targets)
print(f"loss of the sharded model {cut:.4f}, of the loaded one {one:.4f}")
dist.barrier()  # all have read it
if rank == 0:
    shutil.rmtree(folder)

# %%
# %distributed stop
