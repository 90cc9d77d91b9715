"""Plans of programs: `plan.run`."""
