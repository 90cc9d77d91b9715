#!/usr/bin/env bash
# Subject:  a pandas Series compared with a tensor by == or !=, as for the accuracy of predictions in a table.
# Versions: torch 2.13.0, pandas 3.1.1, numpy 2.4.6, Python 3.11, Linux, CPU.
# Expected: element by element, as with an array, a list or a tensor's .numpy(); or an error, as Series > tensor raises
#           and as polars raises.
# Happens:  == is False everywhere and != True everywhere, for equal numbers too, whichever stands first: an accuracy of
#           0.0. Series.eq and an Index are alike. No warning speaks of it.
# Source:   I found no entry; pytorch/pytorch#51112 (open) is another meeting of tensors and Series.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/pip install --quiet --no-compile --disable-pip-version-check torch==2.13.0 numpy==2.4.6 pandas==3.1.1
cat > check.py <<'PY'
import warnings

import pandas as pd
import torch

warned = warnings.catch_warnings(record=True).__enter__()
warnings.simplefilter("always")
labels = pd.Series([2, 0, 1, 1], name="label")
predicted = torch.tensor([2, 0, 1, 0])
ways = {
    "series == array": labels == predicted.numpy(),
    "series == list": labels == predicted.tolist(),
    "series == tensor": labels == predicted,
    "tensor == series": predicted == labels,
    "series.eq(tensor)": labels.eq(predicted),
    "index == tensor": pd.Index(labels) == predicted,
}
for name, equal in ways.items():
    print(f"{name}: accuracy {float(sum(equal)) / len(labels)}, {type(equal).__name__}")
    assert len(equal) == 4
    assert float(sum(equal)) == (0 if "tensor" in name else 3), name
assert (labels != predicted).all()
assert (labels == torch.tensor(labels.to_numpy())).mean() == 0
assert not [w for w in warned if "compar" in str(w.message).lower() or "elementwise" in str(w.message).lower()]
try:
    labels > predicted
except TypeError as error:
    print("series > tensor: TypeError:", error)
else:
    raise AssertionError("series > tensor")
print("unchanged: a Series never equals a tensor")
PY
OMP_NUM_THREADS=1 venv/bin/python check.py 2> errors.txt || { cat errors.txt; exit 1; }
