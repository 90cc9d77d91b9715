# refused: 100,000 are allowed
recipe = {"hidden": 128, "blocks": 2, "batch": 8, "lr": 0.01}
