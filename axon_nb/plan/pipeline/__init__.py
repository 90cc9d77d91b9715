"""Pipeline schedules: `plan.schedule`."""
