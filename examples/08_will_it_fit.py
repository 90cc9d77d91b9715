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
# You have a model of seven billion parameters, and someone offers you 64 GPUs. Does it fit? How should it be cut? How
# long will a step take, and how much of that will the GPUs spend waiting?
#
# `axon_nb.plan` answers before there is any GPU. Nothing here is trained and no ranks are started: the model is built
# and run on tensors that have shapes and no data, so that all of this takes a minute on a laptop.

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
# that is 16 bytes. These *model states* follow from a formula, so the answer is there at once.

# %%
alone = plan.memory(seven, 1, method="closed_form")
alone

# %% [markdown]
# More than a hundred GiB: no single GPU with 80 GiB holds that, and nothing has been computed yet.
#
# ## Many GPUs
#
# With plain data parallelism (`ddp`) every GPU keeps all of it, however many there are. ZeRO deals it out: first the
# optimizer's states (`optimizer_state`), then gradients and parameters, too (`full_shard`).

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
# Between two steps 8 GPUs are enough, then. Within a step there is more: the *activations* that the forward pass keeps
# for the backward pass, and whole parameters, which FSDP gathers for as long as a layer computes. That depends on the
# model's code, so a step of one rank is simulated, in a process of its own; of the 34 equal blocks 4 and 5 are run, and
# the rest lies on a line with them.

# %%
one = plan.memory(seven, 8, mixed_precision="bfloat16", batch=1)
one

# %% [markdown]
# One sample a GPU fits. What if we take four? And what if each block keeps its input only, and is computed again when
# the backward pass comes to it? Then so little is kept that the highest moment is another one.

# %%
four = plan.memory(seven, 8, mixed_precision="bfloat16", batch=4)
again = plan.memory(seven, 8, mixed_precision="bfloat16", batch=4, activation_checkpointing=True)
asked = {"1 sample": one, "4 samples": four, "4 samples, computed again": again}
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
# ## Cut into stages: the pipeline's bubble
#
# A model that is too large for a node can be cut into *stages* that pass their activations on. The batch goes through
# in *microbatches*, so that stages work at the same time; but at the beginning the last one waits for the first
# microbatch, and at the end the first one for the last gradient. That idle time is the *bubble*. More microbatches make
# it smaller. How many are alive at once is what memory has to hold, and there the schedules differ.

# %%
rows = []
for microbatches in (8, 16, 32, 64):
    gpipe, one_f_one_b = (plan.schedule(name, 8, microbatches) for name in ("GPipe", "1F1B"))
    interleaved = plan.schedule("Interleaved1F1B", 16, microbatches)
    row = {
        "microbatches": microbatches,
        "bubble": f"{one_f_one_b.bubble:.1%}",
        "bubble, two stages a rank": f"{interleaved.bubble:.1%}",
        "live at once, GPipe": gpipe.peak_live,
        "live at once, 1F1B": one_f_one_b.peak_live,
    }
    rows.append(row)
pd.DataFrame(rows).set_index("microbatches")

# %% [markdown]
# Stages are never quite alike. Here the last one, which has the output layer and the loss, takes half as long again,
# and a message takes 2 ms. Look at how the others wait for it.

# %%
plan.schedule("1F1B", 4, 8, [(0.020, 0.040)] * 3 + [(0.030, 0.060)], latency_s=0.002)

# %% [markdown]
# ## What goes over the wires
#
# Sharding saves memory and costs messages: FSDP gathers every parameter twice a step and reduces every gradient. Calls
# and bytes are counted as torch makes them; times follow from the link, here one InfiniBand port a GPU.

# %%
plan.communication(seven, 64, strategy="full_shard", mixed_precision="bfloat16", batch=4, links="ib-ndr")

# %% [markdown]
# ## How long a step takes
#
# Computation, and what communication does not hide behind it. `rates` is what a GPU really reaches: a preset such as
# `"h100"`, a number of your own, or what `plan.calibrate` has measured on ranks that run. What the prediction rests on
# is listed below it.

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
# Data, tensor and pipeline parallelism in any proportion, three ways to shard, with and without computing activations
# again, and several numbers of microbatches: `plan.search` looks at all of them. Those that fit come first, the fastest
# at the top; the others say why they do not.

# %%
found = plan.search(seven, 64, 80, global_batch=256, mixed_precision="bfloat16")
found

# %%
found.figure()

# %% [markdown]
# As a table there is more to ask of it. With GPUs of 24 GiB, which layouts are left, and what is in the way of the
# others?

# %%
small = plan.search(seven, 64, 24, global_batch=256, mixed_precision="bfloat16").to_frame()
small[small.fits].head(5)

# %%
small[~small.fits & small.memory_gib.notna()][["dp", "tp", "pp", "strategy", "reason"]].head(5).style.hide(axis="index")

# %% [markdown]
# A search estimates memory. Before you ask for the GPUs, have the winner simulated.

# %%
best = found.best
plan.memory(seven, **best.layout(found.global_batch), mixed_precision="bfloat16")

# %% [markdown]
# ## Your own model
#
# Give a function that makes it, and say what it is called with; `"batch"` stands for the samples of a rank. If it
# cannot be planned for, a sentence says why.

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
# How far can these numbers be trusted? Model states and bytes on the wire are exact, held against real ranks byte for
# byte; peaks are within a few percent of what an allocator hands out. Times are as good as the rates: on ranks of your
# own, `here = plan.calibrate(cluster=axon_nb.current_cluster())` measures them, and `rates=here, links=here` uses them.
