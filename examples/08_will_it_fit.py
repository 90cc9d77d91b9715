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
# # Will it fit?
#
# You have a model of seven billion parameters, and someone offers you 64 GPUs. Does it fit? How should it be split? How
# long will a step take, and how much of that will the GPUs spend waiting?
#
# `axon_nb.plan` answers before you have any GPU. Nothing here is trained and no ranks are started: the model is built
# and run on tensors that have shapes but no data, so the whole notebook takes a minute on a laptop.

# %%
import pandas as pd
import plotly.io as pio

from axon_nb import plan
from axon_nb.parallel.models import GPTConfig

pio.renderers.default = "plotly_mimetype+notebook"  # in notebooks, and in pages made from them, without a network
GIB = 1024**3
seven = GPTConfig(vocab=32_000, context=2048, hidden=4096, heads=32, blocks=34)

# %% [markdown]
# ## One GPU
#
# Training keeps four numbers for each parameter: the parameter, its gradient, and Adam's two running means. In float32
# that is 16 bytes. These *model states* follow from a formula, so the answer is immediate.

# %%
alone = plan.memory(seven, 1, method="closed_form")
alone

# %% [markdown]
# More than a hundred GiB, before anything is computed: no GPU with 80 GiB can hold that.
#
# ## Many GPUs
#
# With plain data parallelism (`ddp`) every GPU keeps all of it, however many there are. ZeRO shards it: first the
# optimizer states (`optimizer_state`), then also gradients and parameters (`full_shard`).

# %%
states = {
    strategy: {
        f"{world_size} GPUs": plan.memory(seven, world_size, strategy=strategy, method="closed_form").peak_bytes / GIB
        for world_size in (8, 64, 512)
    }
    for strategy in ("ddp", "optimizer_state", "full_shard")
}
pd.DataFrame(states).T.style.format("{:.1f} GiB")

# %% [markdown]
# ## The peak
#
# So between two steps 8 GPUs are enough. Within a step more memory is needed: for the *activations* that the forward
# pass keeps for the backward pass, and for full parameters, which FSDP gathers while a layer computes. That depends on
# the model's code, so one rank's step is simulated in a separate process. Of the 34 equal blocks only 4 and 5 are run,
# and the rest is extrapolated linearly.

# %%
one = plan.memory(seven, 8, mixed_precision="bfloat16", batch=1)
one

# %% [markdown]
# One sample per GPU fits. What about four? And what if each block keeps only its input and is recomputed in the
# backward pass? Then so little is kept that the peak is at a different moment.

# %%
four = plan.memory(seven, 8, mixed_precision="bfloat16", batch=4)
again = plan.memory(seven, 8, mixed_precision="bfloat16", batch=4, activation_checkpointing=True)
asked = {"1 sample": one, "4 samples": four, "4 samples, recomputed": again}
pd.DataFrame(
    {
        name: {
            "peak": f"{made.peak_bytes / GIB:.1f} GiB",
            "of it activations": f"{made.worst.peak.activations / GIB:.1f} GiB",
            "the peak is in": made.worst.phase,
            "fits in 40 GiB": "yes" if made.fits(40) else "no",
        }
        for name, made in asked.items()
    }
).T

# %%
four.figure()

# %% [markdown]
# ## Split into stages: the pipeline's bubble
#
# A model that is too large for one node can be split into *stages* that pass their activations on. The batch goes
# through in *microbatches*, so that stages work at the same time. But at the beginning the last stage waits for the
# first microbatch, and at the end the first stage waits for the last gradient. That idle time is the *bubble*; more
# microbatches make it smaller. Memory must hold the microbatches that are live at once, and there the schedules differ.

# %%
rows = []
for microbatches in (8, 16, 32, 64):
    gpipe, one_f_one_b = (plan.schedule(name, 8, microbatches) for name in ("GPipe", "1F1B"))
    interleaved = plan.schedule("Interleaved1F1B", 16, microbatches)
    row = {
        "microbatches": microbatches,
        "bubble": f"{one_f_one_b.bubble:.1%}",
        "bubble, two stages per rank": f"{interleaved.bubble:.1%}",
        "live at once, GPipe": gpipe.peak_live,
        "live at once, 1F1B": one_f_one_b.peak_live,
    }
    rows.append(row)
pd.DataFrame(rows).set_index("microbatches")

# %% [markdown]
# Stages are never quite equal. Here the last one, which has the output layer and the loss, takes 50 % longer, and a
# message takes 2 ms. See how the others wait for it.

# %%
plan.schedule("1F1B", 4, 8, [(0.020, 0.040)] * 3 + [(0.030, 0.060)], latency_s=0.002)

# %% [markdown]
# ## What ranks send
#
# Sharding saves memory but needs messages: FSDP gathers every parameter twice per step and reduces every gradient.
# Calls and bytes are those that torch makes; times follow from the link, here one InfiniBand port per GPU.

# %%
plan.communication(seven, 64, strategy="full_shard", mixed_precision="bfloat16", batch=4, links="ib-ndr")

# %% [markdown]
# ## How long a step takes
#
# A step takes the time of computation plus the communication that does not overlap with it. `rates` is what a GPU
# actually achieves: a preset such as `"h100"`, your own number, or what `plan.calibrate` measured on running ranks. The
# assumptions are listed below the prediction.

# %%
step = plan.step_time(
    seven, 64, strategy="full_shard", mixed_precision="bfloat16", batch=4, rates="h100", links="ib-ndr"
)
step

# %%
step.figure()

# %% [markdown]
# ## Which layout, then?
#
# `plan.search` tries all combinations of data, tensor and pipeline parallelism, three ways to shard, with and without
# activation checkpointing, and several numbers of microbatches. Layouts that fit come first, with the fastest at the
# top; each of the others says why it does not fit.

# %%
found = plan.search(seven, 64, 80, global_batch=256, mixed_precision="bfloat16")
found

# %%
found.figure()

# %% [markdown]
# The result is also a DataFrame that you can query. With GPUs of 24 GiB, which layouts are left, and why do the others
# not fit?

# %%
small = plan.search(seven, 64, 24, global_batch=256, mixed_precision="bfloat16").to_frame()
small[small.fits].head(5)

# %%
small[~small.fits & small.memory_gib.notna()][["dp", "tp", "pp", "strategy", "reason"]].head(5).style.hide(axis="index")

# %% [markdown]
# A search only estimates memory. Before you ask for the GPUs, simulate the winner.

# %%
best = found.best
plan.memory(seven, **best.layout(found.global_batch), mixed_precision="bfloat16")

# %% [markdown]
# ## Your own model
#
# Pass a function that creates it, and describe its inputs; `"batch"` stands for the samples of one rank. If the model
# or layout cannot be planned, an error says why.

# %%
from torch import nn

from axon_nb.errors import UsageError


def classifier():
    """A plain network for pictures of 224 x 224 pixels."""
    return nn.Sequential(nn.Flatten(), nn.Linear(3 * 224 * 224, 8192), nn.ReLU(), nn.Linear(8192, 1000))


pictures = plan.TensorSpec(("batch", 3, 224, 224))
mine = plan.memory(classifier, 4, inputs=pictures, batch=32)
print(f"a peak of {mine.peak_bytes / GIB:.1f} GiB on each of 4 GPUs, in the {mine.worst.phase} pass")
try:
    plan.memory(classifier, mesh={"dp": 2, "tp": 3}, world_size=8, inputs=pictures)
except UsageError as error:
    print(error)

# %% [markdown]
# ## Llama 3 8B on 8 GPUs
#
# Models of Hugging Face are planned from their config; weights are never read. Each decoder layer is an FSDP unit. Does
# a layout for 8 GPUs of 80 GiB exist, and how long does its step take?

# %%
from transformers import LlamaConfig

llama = LlamaConfig(
    vocab_size=128_256,
    hidden_size=4096,
    intermediate_size=14_336,
    num_hidden_layers=32,
    num_attention_heads=32,
    num_key_value_heads=8,
    max_position_embeddings=8192,
)
layouts = plan.search(llama, 8, 80, seq=4096, global_batch=8, mixed_precision="bfloat16", rates="h100", links="h100")
layouts.to_frame().head(3)

# %% [markdown]
# ## A program that you have written
#
# A model is not all of a program. `plan.run` runs the program itself, with its own wrappers and collectives, on 64
# ranks that do not exist. Ranks that do the same run once. A virtual clock says when each of them computes and when it
# waits. Here, pipelines of four stages pass activations on, and replicas average their gradients by hand.

# %%
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B


def train(steps=2, microbatches=8, width=4096, rows=512):
    """Train stages of four layers, in 16 replicas of a pipeline."""
    grid = init_device_mesh("cuda", (16, 4), mesh_dim_names=("dp", "pp"))
    place, last = grid.get_local_rank("pp"), grid["pp"].size() - 1
    layers = nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(4)))
    layers.to("cuda", torch.bfloat16)
    passed = [
        torch.empty(rows, width, device="meta", dtype=torch.bfloat16, requires_grad=needed)
        for needed in (place > 0, True)
    ]
    stage = PipelineStage(layers, place, last + 1, torch.device("cuda"), *passed, group=grid.get_group("pp"))
    schedule = Schedule1F1B(stage, microbatches, loss_fn=nn.functional.mse_loss)
    optimizer = torch.optim.AdamW(layers.parameters())
    for _ in range(steps):
        batch = torch.randn(microbatches * rows, width, device="cuda", dtype=torch.bfloat16)
        schedule.step(*([batch] if place == 0 else []), target=batch if place == last else None)
        for parameter in layers.parameters():
            dist.all_reduce(parameter.grad, group=grid.get_group("dp"))
        optimizer.step()
        optimizer.zero_grad()


planned = plan.run(train, 64, device="h100")
planned

# %% [markdown]
# The first stage waits for the last one at the end of each step, and the last one for the first at the beginning. The
# view is that of `%timeline`, one row per kind of rank.

# %%
from axon_nb import show

timeline = show.timeline(planned)

# %% [markdown]
# In a notebook, `%%plan -n 64 --card h100` does the same for a cell. If a line allocates more than the card has,
# `planned.out_of_memory` names it.

# %% [markdown]
# How far can you trust these numbers? Model states and bytes sent are exact, verified against real ranks byte for byte.
# Peaks are within a few percent of what an allocator hands out. Times are as good as the rates: on your own ranks,
# `here = plan.calibrate(cluster=axon_nb.current_cluster())` measures them, and `rates=here, links=here` uses the
# result.
