# refused: more than a computer can hold
from __future__ import annotations

import torch


def merge(out, lse, out2, lse2):
    weight, weight2 = lse.exp()[:, None], lse2.exp()[:, None]
    total = weight + weight2
    return (weight * out + weight2 * out2) / total, total[:, 0].log()
