#!/usr/bin/env bash
# Subject:  parallelize_module on a model whose output layer shares its weight with the embedding.
# Versions: torch 2.13.0, numpy 2.4.6, Python 3.11, Linux, CPU, 2 processes, Gloo.
# Expected: the weight is sharded once and stays shared, since both layers want the same rows of it; or an error, as
#           fully_shard raises for shared weights of two groups.
# Happens:  each layer gets a parameter of its own. The model has one parameter more, nothing is said, and after the first
#           step the two differ: both are trained with a part of the gradient. Tying them again after the call is right.
# Source:   fairseq2#1380 and foundation-model-stack#331 avoid it; torch's own test ties after parallelize_module
#           (pytorch#116475).
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/pip install --quiet --no-compile --disable-pip-version-check torch==2.13.0 numpy==2.4.6
cat > check.py <<'PY'
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (2,))
tokens = torch.tensor([1, 2, 3, 1])


def model():
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Embedding(8, 4), nn.Linear(4, 8, bias=False))
    layers[1].weight = layers[0].weight
    return layers


def split(tie_again):
    layers = model()
    plan = {"0": RowwiseParallel(input_layouts=Replicate(), output_layouts=Replicate()),
            "1": ColwiseParallel(output_layouts=Replicate())}
    parallelize_module(layers, mesh, plan)
    if tie_again:
        layers[1].weight = layers[0].weight
    return layers


def train(layers):
    optimizer = torch.optim.SGD(layers.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        nn.functional.cross_entropy(layers(tokens), tokens.roll(-1)).backward()
        optimizer.step()
    full = [getattr(p, "full_tensor", lambda p=p: p)().detach() for p in (layers[0].weight, layers[1].weight)]
    return len(list(layers.parameters())), full


_, (right, _) = train(model())
count, (embedding, head) = train(split(tie_again=False))
again, (tied, _) = train(split(tie_again=True))
if dist.get_rank() == 0:
    apart = (embedding - head).abs().max().item()
    print(f"{count} parameters instead of 1, apart by {apart:.3f} after three steps; tied again: {again}", flush=True)
assert count == 2 and again == 1
assert not torch.allclose(embedding, head) and not torch.allclose(embedding, right, atol=1e-3)
assert torch.allclose(tied, right, atol=1e-6)
dist.barrier()
dist.destroy_process_group()
PY
GLOO_SOCKET_IFNAME=lo OMP_NUM_THREADS=1 venv/bin/torchrun --standalone --nproc-per-node=2 \
    check.py 2> errors.txt || { cat errors.txt; exit 1; }
echo "unchanged: tensor parallelism parts tied weights"
