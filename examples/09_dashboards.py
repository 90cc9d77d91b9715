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
# # Dashboards: see what your ranks do
#
# Four views show a distributed job while it runs: `%watch` the training, `%timeline` what each rank does from
# millisecond to millisecond, `%shards` where every tensor is, `%memory` what it costs. A view is opened once, in a line
# of its own, and follows all cells that run after it. Below each is a folded picture of the same: it is saved with the
# notebook, and is there without a kernel.
#
# Run the cells one by one, and look at the views while the cells below them run.

# %%
# %load_ext axon_nb
# %distributed start -n 4

# %% [markdown]
# ## A model to look at
#
# A small GPT that reads the source of Python's standard library, on four ranks with `DistributedDataParallel`: every
# rank has the whole model, reads pieces of its own, and gradients are averaged.

# %%
# %%distributed
import time

import axon_nb
from axon_nb.parallel import DDP, FSDP, Pipeline
from axon_nb.parallel.models import GPT, GPTConfig, next_byte_loss, standard_library, windows

torch.set_num_threads(1)
torch.manual_seed(0)
text = standard_library(1 << 19)
config = GPTConfig(context=64, hidden=64, heads=4, blocks=4)
generator = torch.Generator().manual_seed(100 + rank)  # every rank reads other pieces
replicated = DDP(GPT(config), bucket_size_mb=0.1)
optimizer = torch.optim.AdamW(replicated.parameters(), lr=3e-3)
print(f"{sum(p.numel() for p in replicated.parameters()):,} parameters")

# %% [markdown]
# ## `%watch`: is it learning, and how fast?
#
# In the loop, two lines are enough: `axon_nb.progress` counts as `tqdm` does, and `axon_nb.log` reports whatever
# numbers you like. The panel draws them over all ranks (the line is the mean, the band goes from the lowest to the
# highest), says how many steps a second there are and what part of the time is communication, and where each rank is.
# Its stop button interrupts the cell. In a script under `torchrun` the two lines do no harm.

# %%
# %watch


# %%
# %%distributed
def train(model, optimizer, epochs, steps):
    for epoch in axon_nb.progress(range(epochs), desc="epochs"):
        for _ in axon_nb.progress(range(steps), desc="steps"):
            inputs, targets = windows(text, batch=8, seq=config.context, generator=generator)
            loss = next_byte_loss(model(inputs), targets)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            axon_nb.log(loss=loss.detach(), items=len(inputs))
        if rank == 0:
            print(f"epoch {epoch + 1}: loss {loss.item():.3f} nats a byte on rank 0")


train(replicated, optimizer, epochs=4, steps=20)

# %% [markdown]
# ## `%timeline`: what does each rank do, exactly?
#
# One row a rank. Above, what its own code does: forward, backward, optimizer. Below, what communication is under way.
# DDP averages gradients in buckets while backward still runs; how much of that is hidden behind computing is told below
# the rows, and a rank that the others wait for is named.
#
# Zoom with the wheel and Ctrl, or with **+** and **-**; mark a stretch with the mouse; filter with words such as
# `all_reduce rank:2`; walk from span to span with **n** and **p**. `show.timeline()` is `%timeline` as a function; what
# it returns gives the spans as a table later.

# %%
from axon_nb import show

timeline = show.timeline()

# %% [markdown]
# The panel shows the cell that runs, or the last one. With `--watch` a cell also has a view of its own: the state of
# each rank, and its timeline, live while it runs and as pictures afterwards. One rank is slowed down here: which?

# %%
# %%distributed --watch
for _ in range(6):
    inputs, targets = windows(text, batch=8, seq=config.context, generator=generator)
    next_byte_loss(replicated(inputs), targets).backward()
    if rank == 2:
        time.sleep(0.1)
    optimizer.step()
    optimizer.zero_grad()

# %% [markdown]
# The same spans as a table. `%timeline --save trace.json` writes them for [Perfetto](https://ui.perfetto.dev), and
# `%timeline --save page.html` as a page that needs no kernel.

# %%
spans = timeline.to_dataframe()
spans.pivot_table(index="rank", columns="kind", values="seconds", aggfunc="sum").round(2)

# %% [markdown]
# ## `%shards`: where is every tensor?
#
# With DDP each rank holds all of each parameter: the same box for all. `FSDP` cuts every parameter into four.

# %%
# %shards replicated

# %%
# %%distributed
torch.manual_seed(0)
sharded = FSDP(GPT(config))
sharded_optimizer = sharded.optimizer(torch.optim.AdamW, lr=3e-3)
for _ in range(5):
    inputs, targets = windows(text, batch=8, seq=config.context, generator=generator)
    next_byte_loss(sharded(inputs), targets).backward()
    sharded_optimizer.step()
    sharded_optimizer.zero_grad()

# %%
# %shards sharded

# %% [markdown]
# A shard is no use to a layer that computes: just before, its parameters are gathered, and dropped again after. The
# next cell keeps all of them whole for three seconds. Watch the panel above.

# %%
# %%distributed
with sharded.gathered():
    time.sleep(3)

# %% [markdown]
# ## `%memory`: what does it cost?
#
# Parameters, gradients and the optimizer's two states per parameter, measured; below each bar what they should be: by
# formula, and simulated once the panel has seen how the model is called. The dashed line is what the device has, and a
# rank that comes near it is flagged. On CPUs the tensors are counted, on GPUs the allocator is asked: each panel says
# what it measured. Below, ask *what if*: 64 ranks, another strategy, another batch. Another process answers.

# %%
# %memory replicated optimizer

# %%
# %memory sharded sharded_optimizer

# %% [markdown]
# ## A pipeline, beside its ideal
#
# In a pipeline each rank has some of the layers. Below the rows a timeline draws the last step twice: as it was, and as
# it would be if all stages took as long and messages no time. What is left over is the *bubble*. With 8 microbatches on
# 4 ranks it takes 3 / 11 of the time at best; fewer microbatches would make it larger. Try 4.

# %%
# %%distributed --watch
pipe = Pipeline.split(GPT(config), num_microbatches=8, schedule="1F1B", loss=next_byte_loss)
for _ in range(3):
    inputs, targets = windows(text, batch=32, seq=config.context, generator=generator)
    pipe.step(inputs, targets)

# %%
# %distributed stop
