"""How much memory a training step needs: `plan.memory`."""
