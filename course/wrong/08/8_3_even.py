# refused: the split you began with
layers_per_stage = [7, 6, 6, 7]
