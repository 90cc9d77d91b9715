#!/usr/bin/env bash
# Subject:  nn.SyncBatchNorm.convert_sync_batchnorm on a model with subclasses of BatchNorm, and with hooks.
# Versions: torch 2.13.0, numpy 2.4.6, Python 3.11, Linux, CPU, one process.
# Expected: what is not a BatchNorm of torch's own stays as it is, is refused, or keeps its forward and its parameters;
#           hooks stay with the layer, as the layer's weight does.
# Happens:  every subclass becomes a plain SyncBatchNorm. A forward that doubles the result is gone, so the model computes
#           something else in evaluation, too; a parameter of the subclass is gone from parameters() and state_dict();
#           hooks of modules are not called any more. Nothing is said. An optimizer that was made before keeps the lost
#           parameter. Hooks on the weight stay, as the parameter itself moves.
# Source:   pytorch#187298 (open) has it for activations in subclasses and asks for a warning, as timm, mmengine and
#           detectron2 each have a conversion of their own.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/pip install --quiet --no-compile --disable-pip-version-check torch==2.13.0 numpy==2.4.6
cat > check.py <<'PY'
import warnings

import torch
from torch import nn


class Doubled(nn.BatchNorm1d):
    def __init__(self, features: int) -> None:
        super().__init__(features)
        self.gain = nn.Parameter(torch.full((features,), 2.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.gain * super().forward(x)


warned = warnings.catch_warnings(record=True).__enter__()
warnings.simplefilter("always")
calls: list[str] = []
model = nn.Sequential(Doubled(2), nn.BatchNorm1d(2))
model[1].register_forward_hook(lambda *_: calls.append("module"))
model[1].weight.register_hook(lambda _: calls.append("weight"))
model.eval()
x = torch.randn(4, 2)
before, names = model(x).detach(), set(model.state_dict())
calls.clear()
converted = nn.SyncBatchNorm.convert_sync_batchnorm(model)
after = converted(x)
after.sum().backward()
ratio = (before / after.detach()).mean().item()
lost = names - set(converted.state_dict())
print("types:", [type(layer).__name__ for layer in converted], "ratio of results:", round(ratio, 3))
print("lost parameters:", lost, "hooks called:", calls, "warnings:", len(warned))
assert [type(layer).__name__ for layer in converted] == ["SyncBatchNorm"] * 2
assert abs(ratio - 2) < 1e-4 and lost == {"0.gain"}
assert calls == ["weight"] and not warned
print("unchanged: the conversion drops what subclasses add, and hooks")
PY
OMP_NUM_THREADS=1 venv/bin/python check.py 2> errors.txt || { cat errors.txt; exit 1; }
