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
# Four views show a distributed job while it runs: `%watch` the training, `%timeline` what each rank does, millisecond
# by millisecond, `%shards` where every tensor is, `%memory` what it costs. Open each view once, in a line of its own:
# it follows all cells that run after it. Below each is its picture, folded for now; it is saved with the notebook and
# needs no kernel.
#
# Run the cells one by one, and watch the views while the cells below them run.

# %%
# %load_ext axon_nb
# %distributed start -n 4

# %% [markdown]
# ## A model to look at
#
# A small GPT that reads the source of Python's standard library, on four ranks with `DistributedDataParallel`: every
# rank has the full model and reads its own pieces of the text, and gradients are averaged.

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
replicated = DDP(GPT(config).to(device), bucket_size_mb=0.1)
optimizer = torch.optim.AdamW(replicated.parameters(), lr=3e-3)
print(f"{sum(p.numel() for p in replicated.parameters()):,} parameters")

# %% [markdown]
# ## `%watch`: is it learning, and how fast?
#
# In the loop, two lines are enough: `axon_nb.progress` counts like `tqdm`, and `axon_nb.log` reports any numbers you
# like. The panel draws them over all ranks: the line is the mean, the band goes from the lowest to the highest. It also
# shows steps per second, the share of time spent in communication, and where each rank is. Its stop button interrupts
# the cell. In a script under `torchrun` the two lines do no harm.

# %%
# %watch


# %%
# %%distributed
def train(model, optimizer, epochs, steps):
    for epoch in axon_nb.progress(range(epochs), desc="epochs"):
        for _ in axon_nb.progress(range(steps), desc="steps"):
            inputs, targets = windows(text, batch=8, seq=config.context, generator=generator, device=device)
            loss = next_byte_loss(model(inputs), targets)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            axon_nb.log(loss=loss.detach(), items=len(inputs))
        if rank == 0:
            print(f"epoch {epoch + 1}: loss {loss.item():.3f} nats per byte on rank 0")


train(replicated, optimizer, epochs=4, steps=20)

# %% [markdown]
# ## `%timeline`: what does each rank do, exactly?
#
# There is one row per rank: its own code above (forward, backward, optimizer), and communication in flight below. DDP
# averages gradients in buckets while backward still runs. The table below the rows shows how much of that overlaps with
# compute, and names a rank that the others wait for.
#
# Zoom with Ctrl and the wheel, or with **+** and **-**; select a range with the mouse; filter with words such as
# `all_reduce rank:2`; walk from span to span with **n** and **p**. `show.timeline()` is `%timeline` as a function; its
# result gives you the spans as a table later.

# %%
from axon_nb import show

timeline = show.timeline()

# %% [markdown]
# The panel shows the running cell, or the last one. With `--watch` a cell also gets its own view: the state of each
# rank and a timeline, live while it runs and as pictures afterwards. Here one rank is slowed down. Which one?

# %%
# %%distributed --watch
for _ in range(6):
    inputs, targets = windows(text, batch=8, seq=config.context, generator=generator, device=device)
    next_byte_loss(replicated(inputs), targets).backward()
    if rank == 2:
        time.sleep(0.1)
    optimizer.step()
    optimizer.zero_grad()

# %% [markdown]
# Here are the same spans as a table. `%timeline --save trace.json` writes them for [Perfetto](https://ui.perfetto.dev),
# and `%timeline --save page.html` as a page that needs no kernel.

# %%
spans = timeline.to_frame()
spans.pivot_table(index="rank", columns="kind", values="seconds", aggfunc="sum").round(2)

# %% [markdown]
# ## `%shards`: where is every tensor?
#
# With DDP each rank holds every parameter in full: the same box for all. `FSDP` splits every parameter into four
# shards.

# %%
# %shards replicated

# %%
# %%distributed
torch.manual_seed(0)
sharded = FSDP(GPT(config).to(device))
sharded_optimizer = sharded.optimizer(torch.optim.AdamW, lr=3e-3)
for _ in range(5):
    inputs, targets = windows(text, batch=8, seq=config.context, generator=generator, device=device)
    next_byte_loss(sharded(inputs), targets).backward()
    sharded_optimizer.step()
    sharded_optimizer.zero_grad()

# %%
# %shards sharded

# %% [markdown]
# A layer cannot compute with a shard: its parameters are gathered just before it runs, and freed right after. The next
# cell keeps all of them gathered for three seconds. Watch the panel above.

# %%
# %%distributed
with sharded.gathered():
    time.sleep(3)

# %% [markdown]
# ## `%memory`: what does it cost?
#
# The upper bar shows parameters, gradients and the optimizer's two states per parameter, as measured. The bar below it
# is the prediction: a formula at first, and a simulation once the panel has seen how the model is called. The dashed
# line is the device's memory, and a rank that comes near it is flagged. On CPUs the tensors are counted; on GPUs the
# allocator reports. Each panel says what it measured. Below, try *what if*: 64 ranks, another strategy, another batch
# size. A separate process computes the answer.

# %%
# %memory replicated optimizer

# %%
# %memory sharded sharded_optimizer

# %% [markdown]
# ## A pipeline, next to its ideal
#
# In a pipeline each rank has some of the layers. Below the rows, the timeline draws the last step twice: as measured,
# and as it would be with equal stages and instant messages. The remaining idle time is the *bubble*. With 8
# microbatches on 4 ranks it takes 3 / 11 of the time at best; fewer microbatches make it larger. Try 4.

# %%
# %%distributed --watch
pipe = Pipeline.split(GPT(config).to(device), num_microbatches=8, schedule="1F1B", loss=next_byte_loss)
for _ in range(3):
    inputs, targets = windows(text, batch=32, seq=config.context, generator=generator, device=device)
    pipe.step(inputs, targets)

# %%
# %distributed stop
