"""A process group for ranks on one host, over shared memory: it opens no sockets, and every wait can be aborted."""
