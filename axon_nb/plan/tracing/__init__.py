"""Running a model's step on fake tensors."""
