"""Data of the course: it comes with axon_nb, so that nothing is downloaded."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd

import axon_nb


def digits() -> tuple[np.ndarray, np.ndarray]:
    """Return 1,797 handwritten digits in a shuffled order, the same in each call.

    Source: https://archive.ics.uci.edu/dataset/80.

    Returns:
        Images, float32 from 0 to 1 of shape 1797 × 1 × 8 × 8, and labels, int64 from 0 to 9.
    """
    package = Path(axon_nb.__file__).parent
    name = Path("examples", "data", "digits.csv.gz")
    path = package / name if (package / name).exists() else package.parent / name
    table = np.random.default_rng(0).permutation(pd.read_csv(path, header=None).to_numpy())
    return (table[:, :64] / 16).astype("float32").reshape(-1, 1, 8, 8), table[:, 64].astype("int64")
