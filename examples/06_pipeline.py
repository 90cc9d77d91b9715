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
# # Pipelines: a model in stages, a batch in microbatches
#
# If a model does not fit on one device, its layers can be distributed: the first few to rank 0, the next to rank 1, and
# so on. A single batch would keep only one rank busy at a time. So it is split into *microbatches* that follow each
# other through the stages: while rank 1 works on the first one, rank 0 begins the second. The remaining idle time is
# the *bubble*. The order of forwards and backwards, the *schedule*, determines its size and how many activations must
# be kept.
#
# This notebook trains a small GPT in a pipeline of four ranks. Then it measures and draws schedules with layers that
# take a fixed time.

# %%
# %load_ext axon_nb
# %distributed start -n 4

# %% [markdown]
# ## A GPT in four stages
#
# `Pipeline.split` takes a model that is a sequence of blocks, and splits it into stages with about the same number of
# parameters; `at=["block2", …]` would split at names, `split="time"` by measured time. Every rank builds the model and
# keeps only its own stage. Parameters keep their names in the full model.

# %%
# %%distributed
import time

from torch import nn

from axon_nb.parallel import Pipeline, PipelineMemoryStats, bubble_fraction, ideal_timeline
from axon_nb.parallel.models import GPT, GPTConfig, next_byte_loss, standard_library, windows
from axon_nb.records import spans as trace

torch.set_num_threads(1)
torch.manual_seed(0)
config = GPTConfig(context=64, hidden=64, heads=4, blocks=6)
model = GPT(config).to(device)
pipe = Pipeline.split(model, num_microbatches=8, loss=next_byte_loss)  # 1F1B is the default

own = sorted({name.partition(".")[0] for name, _ in pipe.named_parameters()})
print(f"stage {pipe.stage_indices[0]}: {', '.join(own)}; {sum(p.numel() for p in pipe.parameters()):,} parameters")

# %% [markdown]
# ## Training
#
# The text is the source of Python's standard library, byte by byte. `pipe.step(x, target)` runs forward and backward
# for the whole batch: only the first rank needs `x` and only the last one `target`, and afterwards every rank has the
# gradients that one process would have. The last rank gets the loss of each microbatch, the others `None`; `mean_loss`
# returns the mean on all ranks. The optimizer is an ordinary one, for the rank's own parameters.

# %%
# %%distributed
text = standard_library(1 << 19)
generator = torch.Generator().manual_seed(1)
optimizer = torch.optim.AdamW(pipe.parameters(), lr=2e-3)
history = []
for number in range(120):
    x, target = windows(text, batch=32, seq=config.context, generator=generator, device=device)
    optimizer.zero_grad()
    losses = pipe.step(x, target)
    optimizer.step()
    history.append(pipe.mean_loss(losses))
    if rank == 0 and number % 20 == 19:
        print(f"step {number + 1}: {sum(history[-20:]) / 20:.3f} nats per byte")
assert history[-1] < 0.7 * history[0]

# %% [markdown] A forward-only pass gives the output on the last rank and `None` elsewhere. Let the model write some
# text: the byte that the last rank picks is sent to all ranks, because the first rank needs it next.

# %%
# %%distributed
from axon_nb.comm import broadcast

prompt = torch.tensor([list(b"    def __init__(self")] * pipe.num_microbatches, device=device)
for _ in range(120):
    logits = pipe(prompt[:, -config.context :])
    chosen = torch.zeros(len(prompt), 1, dtype=torch.int64, device=device)
    if pipe.is_last:
        odds = (logits[:, -1] / 0.7).softmax(-1).cpu()  # where the generator is
        chosen = torch.multinomial(odds, 1, generator=generator).to(device)
    prompt = torch.cat([prompt, broadcast(chosen, src=pipe.last_rank)], dim=1)
if rank == 0:
    print(bytes(prompt[0].tolist()).decode("utf-8", "replace"))

# %% [markdown]
# ## Schedules, with layers that take a fixed time
#
# Four ranks that share two cores mostly wait for a core. To see the schedules themselves we use stages that sleep: 20
# ms for a forward, 20 ms for the gradient of the input and 20 ms for that of the weights. With two stages per rank,
# each takes half as long.
#
# Everything that a pipeline does is recorded as spans with stage and microbatch. `ideal_timeline` computes the same
# schedule with instant messages.


# %%
# %%distributed
class Wait(torch.autograd.Function):
    """Takes time, and does nothing else."""

    @staticmethod
    def forward(ctx, x, forward_s, backward_s):
        ctx.backward_s = backward_s
        time.sleep(forward_s)
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        time.sleep(ctx.backward_s)
        return grad, None, None


class Sleeper(nn.Module):
    """A stage that takes `seconds` for each of forward, gradient of the input, gradient of the weights."""

    def __init__(self, seconds):
        super().__init__()
        self.seconds = seconds
        self.shift = nn.Parameter(torch.zeros(8, device=device))
        self.scale = nn.Parameter(torch.ones(8, device=device))

    def forward(self, x):
        return Wait.apply(x + self.shift, self.seconds, self.seconds) * Wait.apply(self.scale, 0.0, self.seconds)


def measured(schedule, stages, microbatches=8):
    """The spans of one step, of all ranks."""
    modules = [Sleeper(0.02 * world_size / stages) for _ in range(stages)]
    pipe = Pipeline.from_modules(modules, schedule=schedule, num_microbatches=microbatches, loss=nn.functional.mse_loss)
    x = torch.ones(microbatches, 8, device=device)
    for _ in range(2):  # in the first step, stages also learn the shapes that they will receive
        dist.barrier()
        position = trace.ring.position
        pipe.step(x, x)
    own = [span for span in trace.ring.since(position)[0] if span.stage >= 0]
    everyone = [None] * world_size
    dist.all_gather_object(everyone, own)
    return [span for spans in everyone for span in spans]


# %%
# %%distributed --quiet --out reports
schedules = {
    "GPipe": 4,
    "1F1B": 4,
    "Interleaved1F1B": 8,
    "LoopedBFS": 8,
    "InterleavedZeroBubble": 8,
    "ZBVZeroBubble": 8,
    "DualPipeV": 8,
}
rows, drawn = [], {}
for schedule, stages in schedules.items():
    seconds = 0.02 * world_size / stages
    spans = measured(schedule, stages)
    ideal = ideal_timeline(
        schedule,
        num_ranks=world_size,
        num_stages=stages,
        num_microbatches=8,
        forward_s=seconds,
        backward_s=2 * seconds,
    )
    stats = PipelineMemoryStats.of(schedule, num_ranks=world_size, num_stages=stages, num_microbatches=8)
    rows.append(
        {
            "schedule": schedule,
            "bubble, measured": bubble_fraction(spans),
            "bubble, ideal": bubble_fraction(ideal),
            "live activations of each rank": ", ".join(
                f"{peak * world_size / stages:g}" for peak in stats.peak_per_rank
            ),
        }
    )
    drawn[schedule] = (spans, ideal)
(rows, drawn)

# %% [markdown]
# *Live activations* counts microbatches whose forward is done and whose backward is not, in units of one rank's share
# of the model: memory must hold them. GPipe keeps all of them. 1F1B has the same bubble and keeps at most as many as
# there are ranks. Two stages per rank shrink the bubble at the cost of more messages; delaying the weights' gradients
# nearly fills it.

# %%
import pandas as pd

rows, drawn = reports[0]
pd.DataFrame(rows).style.format({"bubble, measured": "{:.1%}", "bubble, ideal": "{:.1%}"}).hide(axis="index")

# %% [markdown]
# ## The timeline
#
# The measured timeline is above, the ideal one below: forwards, full backwards, and the two parts of a backward where
# they are separate. The number is the microbatch; lighter bars are a rank's second stage. (In the first stage of
# ZBVZeroBubble no rank waits for a gradient of the input, so torch does its whole backward as the part for weights.)

# %%
import plotly.io as pio
from plotly.subplots import make_subplots

pio.renderers.default = "plotly_mimetype+notebook"  # in notebooks, and in pages made from them, without a network
COLORS = {"F": "#088F70", "B": "#8A66E0", "I": "#8A66E0", "W": "#8E4A98"}
NAMES = {"F": "forward", "B": "backward", "I": "backward, inputs", "W": "backward, weights"}
CLEAR, GREY, PALE = "rgba(0, 0, 0, 0)", "#767676", "rgba(128, 128, 128, 0.3)"  # legible on light and dark pages


def draw(schedule):
    """Both timelines of a schedule."""
    figure = make_subplots(rows=2, shared_xaxes=True, vertical_spacing=0.12, subplot_titles=("measured", "ideal"))
    for row, spans in enumerate(drawn[schedule], start=1):
        computing = [span for span in spans if span.name in COLORS]
        begin = min(span.start_ns for span in computing)
        for action, color in COLORS.items():
            chosen = [span for span in computing if span.name == action]
            if chosen:
                figure.add_bar(
                    orientation="h",
                    base=[(span.start_ns - begin) / 1e6 for span in chosen],
                    x=[(span.end_ns - span.start_ns) / 1e6 for span in chosen],
                    y=[f"rank {span.rank}" for span in chosen],
                    text=[span.microbatch for span in chosen],
                    marker={"color": color, "opacity": [0.55 if span.stage > 3 else 1.0 for span in chosen]},
                    name=NAMES[action],
                    legendgroup=action,
                    showlegend=row == 1,
                    textposition="inside",
                    insidetextanchor="middle",
                    hovertemplate=f"{NAMES[action]} of microbatch %{{text}}<br>%{{base:.1f}} ms, for %{{x:.1f}} ms",
                    row=row,
                    col=1,
                )
    figure.update_yaxes(autorange="reversed", categoryorder="category ascending", gridcolor=PALE)
    figure.update_xaxes(gridcolor=PALE, zerolinecolor=PALE)
    figure.update_xaxes(title_text="milliseconds", row=2, col=1)
    figure.update_layout(title=schedule, barmode="overlay", height=430, bargap=0.15)
    figure.update_layout(paper_bgcolor=CLEAR, plot_bgcolor=CLEAR, font_color=GREY)
    return figure


draw("GPipe")

# %%
draw("1F1B")

# %%
draw("Interleaved1F1B")

# %%
draw("ZBVZeroBubble")

# %% [markdown]
# ## More microbatches, smaller bubble
#
# With P ranks, M microbatches and v stages per rank, the bubble of GPipe, 1F1B and Interleaved1F1B is **(P - 1) / (v M
# + P - 1)** of the time. More microbatches cost memory with GPipe, and none with 1F1B. But each is a smaller piece of
# work, which real devices process less efficiently.

# %%
# %%distributed --ranks 0
print("microbatches   bubble   live activations, GPipe / 1F1B")
for microbatches in (4, 8, 16, 32):
    spans = ideal_timeline("1F1B", num_ranks=4, num_microbatches=microbatches)
    gpipe = PipelineMemoryStats.gpipe_peak_activations(4, microbatches)
    one = PipelineMemoryStats.one_f_one_b_peak_activations(4, microbatches)
    print(f"{microbatches:12}   {bubble_fraction(spans):6.1%}   {gpipe} / {one}")

# %%
# %distributed stop
