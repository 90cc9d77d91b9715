# refused: The steps are so short
recipe = {"hidden": 48, "blocks": 2, "batch": 8, "lr": 0.0001}
