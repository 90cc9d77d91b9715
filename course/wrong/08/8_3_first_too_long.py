# refused: The embedding is a small layer
layers_per_stage = [10, 7, 7, 2]
