"""How long a step takes: `plan.step_time`."""
