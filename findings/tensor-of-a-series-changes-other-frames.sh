#!/usr/bin/env bash
# Subject:  torch.from_numpy of a Series, changed in place, under the copy-on-write of pandas 3.
# Versions: torch 2.13.0, pandas 3.1.1, numpy 2.4.6, Python 3.11, Linux, CPU.
# Expected: as pandas 3 promises, a frame that was made from another (rename, df[:], assign) never changes with it;
#           NumPy refuses to write to the array, since it is read-only.
# Happens:  torch drops the read-only flag, with one warning for each process. x.mul_(10) changes the frame, and each
#           frame that was made from it and still shares its memory: a raw table that was kept is scaled as well. In a
#           second cell not even the warning appears. torch.tensor(array) copies.
# Source:   pandas' guide to copy-on-write says that arrays are read-only; torch's warning calls writing undefined.
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

raw = pd.DataFrame({"x": [1.0, 2.0, 3.0]})
table, head, more = raw.rename(columns={"x": "value"}), raw[:], raw.assign(y=0.0)
counts = []
for _ in range(2):
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        tensor = torch.from_numpy(table["value"].to_numpy())
        tensor.mul_(10)
    counts.append(len(warned))
print("raw:", raw.x.tolist(), "- df[:]:", head.x.tolist(), "- assign:", more.x.tolist(), "- warnings:", counts)
assert raw.x.tolist() == head.x.tolist() == more.x.tolist() == table.value.tolist() == [100.0, 200.0, 300.0]
assert counts == [1, 0]
try:
    table["value"].to_numpy()[0] = 0.0
    raise AssertionError("numpy wrote")
except ValueError as error:
    print("NumPy:", error)
table.loc[0, "value"] = -1.0  # pandas' own writes stay apart
assert raw.x.tolist()[0] == 100.0
print("unchanged: a tensor writes into all frames that share memory")
PY
OMP_NUM_THREADS=1 venv/bin/python check.py 2> errors.txt || { cat errors.txt; exit 1; }
