"""The rank's side of `config watch_numbers`: digests of each training step, and where a number ceased to be finite."""
