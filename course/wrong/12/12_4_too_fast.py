# refused: jump over what they look for
recipe = {"hidden": 48, "blocks": 2, "batch": 8, "lr": 0.3}
