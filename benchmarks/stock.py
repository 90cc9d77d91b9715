"""The peer: a stock ipyparallel cluster with `%%px`, set up as in its documentation."""

from __future__ import annotations

START = """
import logging, socket, ipyparallel as ipp
_cluster = ipp.Cluster(n={n}, log_level=logging.WARNING)
rc = _cluster.start_and_connect_sync(activate=True)
with socket.socket() as _s:
    _s.bind(("127.0.0.1", 0))
    _port = _s.getsockname()[1]
for _i in rc.ids:
    rc[_i].push(dict(rank=_i, world_size={n}, port=_port), block=True)
"""

ALL_REDUCE = """%%px
import torch, torch.distributed as dist
dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world_size)
_x = torch.ones(1)
dist.all_reduce(_x)
"""

STOP = "_cluster.stop_cluster_sync()"
