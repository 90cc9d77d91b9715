#!/usr/bin/env bash
# Subject:  torch.distributed.pipelining.pipeline() on a model whose output layer shares its weight with the embedding.
# Versions: torch 2.13.0, numpy 2.4.6, Python 3.11, Linux, CPU, 2 processes with a stage each, Gloo.
# Expected: the stages keep one weight in sync, or an error names the shared weight; the gradient is that of the model.
# Happens:  nothing is said, and three copies of the weight are made: the first stage has one under each name, though it
#           runs no output layer, and the last stage has one. Each copy gets the gradient of its own use; only the sum over
#           both stages is the model's gradient. Without that sum an optimizer trains embedding and output layer apart.
# Source:   pytorch#51931 asked for tied layers in torch's former Pipe, which refused shared parameters on several devices;
#           nothing was found about the tracer.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/pip install --quiet --no-compile --disable-pip-version-check torch==2.13.0 numpy==2.4.6
cat > check.py <<'PY'
import warnings

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import ScheduleGPipe, SplitPoint, pipeline
from torch.nn import functional as F

warned = warnings.catch_warnings(record=True).__enter__()
warnings.simplefilter("always")
dist.init_process_group("gloo")
rank = dist.get_rank()


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.middle, self.out = nn.Embedding(8, 4), nn.Linear(4, 4), nn.Linear(4, 8, bias=False)
        self.out.weight = self.embed.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.middle(self.embed(x)))


def loss(out: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(out.flatten(0, 1), target.flatten())


torch.manual_seed(0)
model, whole = Tied(), Tied()
whole.load_state_dict(model.state_dict())
x = torch.arange(8).view(4, 2)
loss(whole(x), x).backward()
parts = pipeline(model, (x[:2],), split_spec={"middle": SplitPoint.BEGINNING})
stage = parts.build_stage(rank, torch.device("cpu"))
schedule = ScheduleGPipe(stage, 2, loss_fn=loss)
schedule.step(x) if rank == 0 else schedule.step(target=x)
names = [name for name, value in stage.submod.named_parameters() if value.shape == (8, 4)]
own = stage.submod.get_parameter("embed.weight" if rank == 0 else "out.weight").grad
both = own.clone()
dist.all_reduce(both)
wanted = whole.embed.weight.grad
is_own, is_sum = torch.allclose(own, wanted, atol=1e-6), torch.allclose(both, wanted, atol=1e-6)
print(f"stage {rank}: copies {names}; the model's gradient: alone {is_own}, summed {is_sum}", flush=True)
assert names == (["embed.weight", "out.weight"] if rank == 0 else ["out.weight"])
assert (is_own, is_sum) == (False, True)
assert not [one for one in warned if "tied" in str(one.message) or "shared" in str(one.message)]
dist.barrier()
dist.destroy_process_group()
PY
GLOO_SOCKET_IFNAME=lo OMP_NUM_THREADS=1 venv/bin/torchrun --standalone --nproc-per-node=2 check.py 2> errors.txt ||
    { cat errors.txt; exit 1; }
echo "unchanged: the stages train copies apart"
