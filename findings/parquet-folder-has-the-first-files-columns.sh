#!/usr/bin/env bash
# Subject:  a folder of Parquet files, one for each rank, read as one table.
# Versions: pandas 3.1.1, pyarrow 26.0.1, numpy 2.4.6, Python 3.11, Linux.
# Expected: a column that only some files have is there, with missing values, or the read raises, as it does when a
#           column has floats in a later file and integers in the first.
# Happens:  the first file by name decides: columns that it lacks are left out, and later files' numbers are cut to
#           its precision (float64 to float32). What only rank 1 wrote is gone without a word; had rank 0 written it,
#           it would be there.
# Source:   pyarrow's documentation of datasets says that the schema comes from the first file; pandas.read_parquet
#           says nothing.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/pip install --quiet --no-compile --disable-pip-version-check pandas==3.1.1 pyarrow==26.0.1 numpy==2.4.6
cat > check.py <<'PY'
import tempfile

import numpy as np
import pandas as pd

first = pd.DataFrame({"step": [1], "loss": np.array([0.5], dtype=np.float32)})
second = pd.DataFrame({"step": [1], "loss": [0.123456789], "grad_norm": [3.0]})


def read(*frames: pd.DataFrame) -> pd.DataFrame:
    folder = tempfile.mkdtemp(dir=".")
    for rank, frame in enumerate(frames):
        frame.to_parquet(f"{folder}/rank{rank}.parquet")
    return pd.read_parquet(folder)


table, turned = read(first, second), read(second, first)
print("rank 1 has the column:", table.to_dict("list"))
print("rank 0 has the column:", turned.to_dict("list"))
assert list(table) == ["step", "loss"] and list(turned) == ["step", "loss", "grad_norm"]
assert table["loss"].dtype == np.float32 and float(table["loss"][1]) != 0.123456789
assert turned["loss"][0] == 0.123456789
try:
    read(pd.DataFrame({"loss": [1]}), pd.DataFrame({"loss": [0.5]}))
    raise AssertionError("fractions were cut")
except ValueError as error:
    print("integers first:", error)
print("unchanged: the first file decides")
PY
venv/bin/python check.py 2> errors.txt || { cat errors.txt; exit 1; }
