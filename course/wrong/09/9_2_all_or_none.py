# refused: lost all of them
from __future__ import annotations

import math

import torch


def within_capacity(choice, num_experts, factor):
    seats = math.ceil(factor * len(choice) / num_experts)
    return torch.bincount(choice, minlength=num_experts)[choice] <= seats
