# refused: Large batches leave few steps
recipe = {"hidden": 48, "blocks": 2, "batch": 128, "lr": 0.01}
