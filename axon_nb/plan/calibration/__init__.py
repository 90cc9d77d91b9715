"""Measured rates of this machine: `plan.calibrate`."""
