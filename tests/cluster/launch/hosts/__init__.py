"""Agents on other hosts that programs such as ssh and srun start."""
