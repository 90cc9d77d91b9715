# refused: This is the plain mean
from __future__ import annotations

import torch


def merge(out, lse, out2, lse2):
    return (out + out2) / 2, torch.logaddexp(lse, lse2)
