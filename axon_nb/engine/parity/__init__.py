"""The rank's side of `%%distributed --compare`: what a cell computes, on all ranks and on one."""
