"""Answers other programs of the same user, such as `axon-nb status`, while this process uses the cluster."""
