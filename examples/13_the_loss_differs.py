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
# # The loss differs: which tensor is the first that is wrong?
#
# You move a training loop from one process to two ranks, and the loss is a little off. Nothing fails, nothing warns,
# and the curve still goes down. `%%distributed --compare` runs a cell on all ranks, then on rank 0 alone with the
# whole batch, from the same state, and names the first tensor on which they disagree.
#
# Four common mistakes follow, one after the other. Before you run a comparison, guess what it will name.

# %%
# %load_ext axon_nb
# %distributed start -n 2

# %% [markdown]
# ## One process, and two
#
# The model reads a word and predicts the next one. Sentences have 2 to 9 words and are padded to 10; padding does not
# count. They are sorted by length, as many data sets are, so rank 0 gets the short ones.

# %%
# %%distributed
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

from axon_nb.parallel import ColumnParallelLinear, RowParallelLinear, SyncBatchNorm

torch.set_num_threads(1)
PADDING = -100
words = torch.randint(50, (32, 10), generator=torch.Generator().manual_seed(0), device="cpu")
following = (7 * words + 3) % 50
lengths = torch.arange(32, device="cpu") // 4 + 2
following[torch.arange(10, device="cpu") >= lengths[:, None]] = PADDING
words, following = words.to(device), following.to(device)
mine = slice(16 * rank, 16 * rank + 16)


class Words(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(50, 32)
        self.norm = nn.BatchNorm1d(32)
        self.out = nn.Linear(32, 50)

    def forward(self, words):
        return self.out(self.norm(self.embed(words).transpose(1, 2)).transpose(1, 2))


def begin():
    """The same model on every call."""
    torch.manual_seed(0)
    return Words().to(device)


def mean_loss(logits, following):
    return F.cross_entropy(logits.flatten(0, 1), following.flatten(), ignore_index=PADDING)


def step(model, optimizer, words, following, loss_of=mean_loss):
    optimizer.zero_grad()
    loss = loss_of(model(words), following)
    loss.backward()
    optimizer.step()
    return loss.item()


def train(model, *batch):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    return [step(model, optimizer, *batch) for _ in range(20)]


def mean_over_ranks(value):
    total = torch.tensor(value, device=device)
    dist.all_reduce(total)
    return total.item() / world_size


# %%
# %%rank 0
alone = train(begin(), words, following)
print(f"one process: the loss is {alone[-1]:.5f} after {len(alone)} steps")

# %%
# %%distributed
losses = train(DDP(begin()), words[mine], following[mine])
last = mean_over_ranks(losses[-1])
if rank == 0:
    print(f"two ranks: the loss is {last:.5f} after {len(losses)} steps")

# %% [markdown]
# The same weights, the same words, and another loss. Which line is to blame: the model, the loss, DDP, or the data?
#
# Take the batch in a cell of its own, because what differs between ranks there is joined to the global batch. Then
# compare one step.

# %%
# %%distributed
model = DDP(begin())
optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
x, y = words[mine], following[mine]

# %%
# %%distributed --compare
step(model, optimizer, x, y)

# %% [markdown]
# ## First: BatchNorm
#
# Each rank normalises with the mean and variance of its own sentences. axon_nb's `SyncBatchNorm` uses those of all
# ranks; torch's own does so on GPUs.
#
# Is it right now? Compare again.

# %%
# %%distributed
model = DDP(SyncBatchNorm.convert(begin()))
optimizer = torch.optim.SGD(model.parameters(), lr=0.5)

# %%
# %%distributed --compare
step(model, optimizer, x, y)

# %% [markdown]
# ## Second: a mean of means
#
# The forward agrees, and the gradients do not. Rank 0 has fewer words than rank 1, but DDP averages both ranks' means
# with equal weight: each word of a short sentence counts more than one of a long sentence. So divide the sum over this
# rank's words by the number of words on all ranks; the factor undoes DDP's average.


# %%
# %%distributed
def loss_per_word(logits, following):
    count = (following != PADDING).sum()
    dist.all_reduce(count)
    total = F.cross_entropy(logits.flatten(0, 1), following.flatten(), ignore_index=PADDING, reduction="sum")
    return total * world_size / count


# %%
# %%distributed --compare
step(model, optimizer, x, y, loss_per_word)

# %% [markdown]
# Every tensor agrees. So does the loss:

# %%
# %%distributed
losses = train(model, x, y, loss_per_word)
last = mean_over_ranks(losses[-1])
if rank == 0:
    print(f"two ranks: the loss is {last:.5f} after {len(losses)} steps, {alone[-1]:.5f} in one process")

# %% [markdown]
# ## Third: a layer split by hand
#
# Now each rank holds half of the hidden features of an MLP, and all ranks read the same batch. A model that is split
# over ranks needs a plain one with the same names: `--compare plain` fills it with the ranks' weights.


# %%
# %%distributed
class MLP(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(32, 64), nn.Linear(64, 32, bias=False)

    def forward(self, x):
        return self.down(F.gelu(self.up(x)))


class HalfMLP(nn.Module):
    def __init__(self, whole):
        super().__init__()
        half = slice(32 * rank, 32 * rank + 32)
        self.up, self.down = nn.Linear(32, 32), nn.Linear(32, 32, bias=False)
        self.up.weight.data = whole.up.weight.data[half].clone()
        self.up.bias.data = whole.up.bias.data[half].clone()
        self.down.weight.data = whole.down.weight.data[:, half].clone()

    def forward(self, x):
        return self.down(F.gelu(self.up(x)))


def with_mlp():
    torch.manual_seed(1)
    return nn.Sequential(nn.Embedding(50, 32), nn.LayerNorm(32), MLP(), nn.Linear(32, 50)).to(device)


plain, model = with_mlp(), with_mlp()
model[2] = HalfMLP(model[2]).to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.5)

# %%
# %%distributed --compare plain
step(model, optimizer, words, following)

# %% [markdown]
# Each rank's half contributes one term to each output, and nothing adds them. `dist.all_reduce` does, but autograd does
# not know it: it needs a backward. Is this one right?


# %%
# %%distributed
class Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        dist.all_reduce(x := x.clone())
        return x

    @staticmethod
    def backward(ctx, gradient):
        dist.all_reduce(gradient := gradient.clone())
        return gradient


class SummedMLP(HalfMLP):
    def forward(self, x):
        return Sum.apply(super().forward(x))


model = with_mlp()
model[2] = SummedMLP(model[2]).to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.5)

# %%
# %%distributed --compare plain
step(model, optimizer, words, following)

# %% [markdown]
# ## Fourth: summed once too often
#
# The forward is right, and so is the loss of the first step. But every rank computes the same loss, so it has the whole
# gradient of the output already: summed again, it is twice as large. The sum belongs at the other end of the layer,
# where each rank has the gradient through its half only. The two tensor-parallel layers of axon_nb do both right.

# %%
# %%distributed
model = with_mlp()
model[2].up = ColumnParallelLinear.from_linear(model[2].up)
model[2].down = RowParallelLinear.from_linear(model[2].down)
optimizer = torch.optim.SGD(model.parameters(), lr=0.5)

# %%
# %%distributed --compare plain
step(model, optimizer, words, following)

# %% [markdown]
# The report named a module, a phase and a cause each time. `docs/howto/compare.md` says what is compared, which causes
# it knows, and how it measures what rounding may change.

# %%
# %distributed stop
