"""Data of `trainer_class.py`, in a file beside it."""

import torch
from torch.utils.data import Dataset


class RandomPairs(Dataset):
    """Inputs with their sums."""

    def __init__(self, size):
        generator = torch.Generator().manual_seed(7)
        self.inputs = torch.randn(size, 20, generator=generator)

    def __len__(self):
        return len(self.inputs)

    def __getitem__(self, index):
        return self.inputs[index], self.inputs[index].sum().reshape(1)
