#!/usr/bin/env bash
# Subject:  parameters of a model under fully_shard that are written in place after a forward without backward.
# Versions: torch 2.13.0, numpy 2.4.6, Python 3.11, Linux, CPU, 2 processes, Gloo.
# Expected: weights that are set under no_grad (initialized after a dry run, clipped after an evaluation) stay set, as before
#           the forward.
# Happens:  parameters that the outermost module holds itself stay gathered after the forward, as plain tensors, and the
#           write goes there. The next forward uses it, so that all looks right; backward then frees the gathered tensors, and
#           the old weights are back. Layers with a fully_shard of their own keep the write. model.reshard() before the
#           write is right.
# Source:   pytorch#144289 and pytorch#131965 ask why the weights are not DTensors then; nothing there about writes.
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
from torch.distributed.fsdp import fully_shard

warned = warnings.catch_warnings(record=True).__enter__()
warnings.simplefilter("always")
dist.init_process_group("gloo")


def written(dry_run, reshard):
    """What three moments see of weights that were set to 2: now, the next forward, and after its backward."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    fully_shard(model[1])
    fully_shard(model)
    if dry_run:
        with torch.no_grad():
            model(torch.ones(1, 4))
    if reshard:
        model.reshard()
    with torch.no_grad():
        for weight in model.parameters():
            weight.fill_(2)
    result = model(torch.ones(1, 4))
    result.sum().backward()
    first, second = (bool((layer.weight.full_tensor() == 2).all()) for layer in model)
    return result[0, 0].item(), first, second


results = {"no forward": written(False, False), "reshard": written(True, True), "forward": written(True, False)}
if dist.get_rank() == 0:
    for name, (output, first, second) in results.items():
        print(f"{name}: next output {output:g}, kept by the root's layer {first}, by its own group {second}", flush=True)
assert results["no forward"] == results["reshard"] == (64, True, True)
assert results["forward"] == (64, False, True)
assert not [w for w in warned if "shard" in str(w.message).lower()]
dist.barrier()
dist.destroy_process_group()
PY
GLOO_SOCKET_IFNAME=lo OMP_NUM_THREADS=1 venv/bin/torchrun --standalone --nproc-per-node=2 \
    check.py 2> errors.txt || { cat errors.txt; exit 1; }
echo "unchanged: what is written after an evaluation is gone after the next backward"
