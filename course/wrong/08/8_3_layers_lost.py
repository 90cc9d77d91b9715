# refused: the model has 26
layers_per_stage = [7, 7, 7, 3]
