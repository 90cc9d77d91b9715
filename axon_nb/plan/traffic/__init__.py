"""What ranks send each other in a step: `plan.communication`."""
