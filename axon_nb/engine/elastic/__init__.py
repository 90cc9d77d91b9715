"""Worlds that change size: what each rank does for `%distributed resize`."""
