#!/usr/bin/env bash
# Subject:  floating-point inputs of a model under fully_shard with param_dtype=bfloat16.
# Versions: torch 2.13.0, numpy 2.4.6, Python 3.11, Linux, CPU, 2 processes, Gloo.
# Expected: as under autocast, the policy is about parameters and matrix products; a time step, an age or a coordinate
#           reaches the module as it was passed.
# Happens:  every floating-point tensor among the arguments is rounded to bfloat16 first: 997, 998 and 999 become 996, 1000
#           and 1000, so different time steps are one. Integers and buffers stay. No warning is given.
#           cast_forward_inputs=False is right.
# Source:   the option is documented; torchtitan#2881 turned it off, as it rounded rotary tables.
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
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

dist.init_process_group("gloo")
steps = torch.tensor([997.0, 998.0, 999.0])


class Denoiser(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(1, 1)
        self.register_buffer("table", torch.arange(1000.0))

    def forward(self, image, step, index):
        self.seen = step.tolist(), index.tolist(), self.table.dtype
        return self.layer(image)


def seen(**options):
    model = Denoiser()
    if options:
        fully_shard(model, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, **options))
        model(torch.ones(1, 1, dtype=torch.bfloat16), steps, steps.long())
    else:
        with torch.autocast("cpu", torch.bfloat16):
            model(torch.ones(1, 1), steps, steps.long())
    return model.seen


autocast, cast, kept = seen(), seen(cast_forward_inputs=True), seen(cast_forward_inputs=False)
if dist.get_rank() == 0:
    print(f"autocast {autocast[0]}, fully_shard {cast[0]}, without casts {kept[0]}", flush=True)
assert MixedPrecisionPolicy().cast_forward_inputs
assert autocast == kept == ([997, 998, 999], [997, 998, 999], torch.float32)
assert cast == ([996, 1000, 1000], [997, 998, 999], torch.float32)
dist.barrier()
dist.destroy_process_group()
PY
GLOO_SOCKET_IFNAME=lo OMP_NUM_THREADS=1 venv/bin/torchrun --standalone --nproc-per-node=2 \
    check.py 2> errors.txt || { cat errors.txt; exit 1; }
echo "unchanged: time steps are rounded before the model sees them"
