#!/usr/bin/env bash
# Subject:  a tensor as a keyword of a pipeline schedule's step, which belongs to all rows: scales of features, a mask
#           over positions.
# Versions: torch 2.13.0, numpy 2.4.6, Python 3.11, Linux, CPU, 2 processes with a stage each, Gloo.
# Expected: what the model gives without a pipeline: rows are dealt out to microbatches, and a tensor whose first
#           dimension is not the batch goes to each microbatch whole; or an error asks which is meant.
# Happens:  every tensor is cut along its first dimension. Four scales of four features and four microbatches: each
#           microbatch gets one number, which broadcasts over all features. The result has the right shape and other
#           numbers; no warning. A list goes along whole.
# Source:   pytorch/torchtitan#4098 (closed) and NVIDIA-NeMo/Automodel#3208 fell into it where lengths differ, with an
#           error; the documentation of step says that inputs are split, not along what.
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
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

warned = warnings.catch_warnings(record=True).__enter__()
warnings.simplefilter("always")
dist.init_process_group("gloo")
rank = dist.get_rank()


class Scale(torch.nn.Module):
    def forward(self, rows, scales):
        return rows * torch.as_tensor(scales)


def through(microbatches: int, scales):
    stage = PipelineStage(Scale(), rank, 2, torch.device("cpu"))
    schedule = ScheduleGPipe(stage, microbatches)
    return schedule.step(*([rows] if rank == 0 else []), scales=scales)


rows = torch.ones(8, 4)
scales = torch.tensor([1.0, 2.0, 3.0, 4.0])
model = torch.nn.ModuleList([Scale(), Scale()])
whole = model[1](model[0](rows, scales), scales)
cut, listed = through(4, scales), through(4, scales.tolist())
if rank == 1:
    print("without a pipeline, each row:", whole[0].tolist())
    print("with 4 microbatches, the first and the last row:", cut[0].tolist(), cut[-1].tolist())
    print("with the scales as a list:", listed[0].tolist(), listed[-1].tolist(), flush=True)
    assert torch.equal(listed, whole)
    assert cut.shape == whole.shape and not torch.equal(cut, whole)
    assert torch.equal(cut, (scales**2).repeat_interleave(2)[:, None].expand(8, 4))
    assert not [w for w in warned if "chunk" in str(w.message) or "scales" in str(w.message)]
dist.barrier()
dist.destroy_process_group()
PY
GLOO_SOCKET_IFNAME=lo OMP_NUM_THREADS=1 venv/bin/torchrun --standalone --nproc-per-node=2 \
    check.py 2> errors.txt || { cat errors.txt; exit 1; }
echo "unchanged: keywords are cut along their first dimension"
