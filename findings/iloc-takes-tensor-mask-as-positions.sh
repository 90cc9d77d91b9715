#!/usr/bin/env bash
# Subject:  rows of a DataFrame selected by a boolean tensor: df.iloc[mask].
# Versions: torch 2.13.0, pandas 3.1.1, numpy 2.4.6, Python 3.11, Linux, CPU.
# Expected: the rows where the mask is True, as with mask.numpy(), or an error, as from df[mask] and df.loc[mask].
# Happens:  True and False count as the positions 1 and 0: a table as long as the mask comes back, made of the first
#           two rows. Its length fits, and means and accuracies of it are those of two rows.
# Source:   pandas recognizes masks that are arrays, lists or its own types. I found no entry about tensors in iloc.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/pip install --quiet --no-compile --disable-pip-version-check torch==2.13.0 numpy==2.4.6 pandas==3.1.1
cat > check.py <<'PY'
import pandas as pd
import torch

table = pd.DataFrame({"label": [10, 20, 30, 40]})
mask = torch.tensor([False, False, True, True])
found, right = table.iloc[mask], table.iloc[mask.numpy()]
series = table["label"].iloc[mask]
print(f"iloc[mask]: {found.label.tolist()}, of a Series {series.tolist()}, iloc[mask.numpy()]: {right.label.tolist()}")
assert found.label.tolist() == series.tolist() == [10, 10, 20, 20]
assert right.label.tolist() == table.iloc[mask.tolist()].label.tolist() == [30, 40]
for name, select in (("df[mask]", lambda: table[mask]), ("df.loc[mask]", lambda: table.loc[mask])):
    try:
        select()
        raise AssertionError(name)
    except KeyError as error:
        print(f"{name}: KeyError: {str(error)[:60]}")
assert table.iloc[torch.tensor([3, 0])].label.tolist() == [40, 10]  # positions are right
print("unchanged: a mask counts as positions")
PY
OMP_NUM_THREADS=1 venv/bin/python check.py 2> errors.txt || { cat errors.txt; exit 1; }
