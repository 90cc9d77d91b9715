#!/usr/bin/env bash
# Subject:  conv2d of an image that is sharded along its height or width, as a DTensor.
# Versions: torch 2.13.0, numpy 2.4.6, Python 3.11, Linux, CPU, 2 processes, Gloo.
# Expected: the convolution of the whole image: sharded like the image, with rows exchanged at the seams, or gathered first,
#           as pooling does; else the error that other operations without a rule raise.
# Happens:  the result has the whole image's shape and says Replicate(), but each process holds its own rows only, computed
#           as if the other's were padding. full_tensor() returns these rows. A mean of it is this process's own, called
#           replicated. Pooling of the same image is right.
# Source:   pytorch#191926 and pytorch#186129 (open) tell of wrong labels in backward and of depthwise layers.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/pip install --quiet --no-compile --disable-pip-version-check torch==2.13.0 numpy==2.4.6
cat > check.py <<'PY'
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (2,))
torch.manual_seed(0)
image, kernel = torch.randn(1, 3, 8, 8), torch.randn(4, 3, 3, 3)
whole = F.conv2d(image, kernel, padding=1)
replicated = distribute_tensor(kernel, mesh, [Replicate()])
for side, dim in (("height", 2), ("width", 3)):
    split = distribute_tensor(image, mesh, [Shard(dim)])
    result = F.conv2d(split, replicated, padding=1)
    rank, local = dist.get_rank(), result.to_local()
    alone = F.conv2d(image.chunk(2, dim)[rank], kernel, padding=1)
    if rank == 1:
        print(f"{side}: says {tuple(result.shape)} {result.placements}, holds {tuple(local.shape)}; "
              f"mean {result.mean().full_tensor().item():.4f} instead of {whole.mean().item():.4f}", flush=True)
    assert result.shape == whole.shape and result.placements == (Replicate(),)
    assert local.shape == alone.shape != whole.shape and torch.allclose(local, alone, atol=1e-5)
    assert torch.equal(result.full_tensor(), local)
    assert not torch.allclose(result.mean().full_tensor(), whole.mean())
    pooled = F.max_pool2d(split, 3, padding=1).full_tensor()
    assert torch.equal(pooled, F.max_pool2d(image, 3, padding=1))
dist.barrier()
dist.destroy_process_group()
PY
GLOO_SOCKET_IFNAME=lo OMP_NUM_THREADS=1 venv/bin/torchrun --standalone --nproc-per-node=2 \
    check.py 2> errors.txt || { cat errors.txt; exit 1; }
echo "unchanged: a split image's convolution is a part that claims to be the whole"
