"""Every environment variable that axon_nb reads: its name, its default, and what it does.

`scripts/settings_table.py` makes a table of them in docs/settings.md from the docstrings here.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

__all__ = [
    "ACCELERATE_PLUGINS",
    "CHECK",
    "CONTAINERS",
    "DEEPSPEED_ACCELERATOR",
    "IPYTHON_DIR",
    "MASTER_ADDR",
    "MASTER_PORT",
    "MPICH",
    "NCCL_INTERFACE",
    "NCCL_RECOVERY",
    "OPEN_MPI",
    "PROGRAM_PATH",
    "PYTHON_PATH",
    "RUNTIME_DIR",
    "RUN_ID",
    "SESSION_NAME",
    "SLURM",
    "SLURM_HOSTS",
    "TEMPORARY",
    "TORCHRUN",
    "USER_CACHE",
    "USER_RUNTIME_DIR",
    "VISIBLE_GPUS",
    "WARM_UP",
    "Variable",
    "Variables",
]

_ON = ("1", "on", "true", "yes")
_OFF = ("0", "off", "false", "no")


@dataclass(frozen=True, slots=True)
class Variable:
    """One environment variable."""

    name: str
    default: str = ""
    """Its value where it is not set."""

    def get(self, environ: Mapping[str, str] | None = None) -> str:
        """Its value in `environ` (default: this process's environment)."""
        return (os.environ if environ is None else environ).get(self.name) or self.default

    def on(self) -> bool:
        """Whether a variable that switches something on or off is on; what is neither leaves the default."""
        text = self.get().lower()
        return text in _ON if self.default.lower() in _OFF else text not in _OFF


@dataclass(frozen=True, slots=True)
class Variables:
    """Variables that belong together."""

    names: tuple[str, ...]


WARM_UP = Variable("AXON_NB_WARM_UP", default="1")
"""`0` turns the setting `warm_up` off from the start. Set it before `%load_ext axon_nb`."""

RUNTIME_DIR = Variable("AXON_NB_RUNTIME_DIR")
"""Folder for the clusters' sockets, keys and logs: a short path on a local disk. If it is not set, `XDG_RUNTIME_DIR` is
used, then the temporary folder."""

CHECK = Variable("AXON_NB_CHECK", default="0")
"""`1` makes every collective of `axon_nb.comm` first ask whether all ranks make the same call with tensors that fit, as
`checking()` does. Set it before the kernel or the script starts."""

CONTAINERS = Variables(("KUBERNETES_SERVICE_HOST", "APPTAINER_CONTAINER", "SINGULARITY_CONTAINER"))
"""Set inside Kubernetes, Apptainer and Singularity: `axon-nb doctor` words its fixes accordingly."""

USER_CACHE = Variable("XDG_CACHE_HOME", "~/.cache")
"""Folder in which the self-test keeps its verdict for each build of torch and Python, below `axon_nb/self_test`."""
USER_RUNTIME_DIR = Variable("XDG_RUNTIME_DIR")
"""The user's folder for sockets, used if `AXON_NB_RUNTIME_DIR` is not set."""

TEMPORARY = Variables(("TMPDIR", "TEMP", "TMP"))
"""The temporary folder, as Python's `tempfile` finds it; used for sockets if neither of the two above is set."""

IPYTHON_DIR = Variable("IPYTHONDIR")
"""IPython's folder. If it (or, if it is not set, `~/.ipython`) cannot be written, ranks use a folder of the cluster."""

SESSION_NAME = Variable("JPY_SESSION_NAME")
"""The notebook's path, set by Jupyter. A cluster started without `--name` is named after it; without it, `default`."""

VISIBLE_GPUS = Variable("CUDA_VISIBLE_DEVICES")
"""The GPUs that `%distributed start` chooses from, in this order; all if it is not set."""

PYTHON_PATH = Variable("PYTHONPATH")
"""Passed on to the host agent, with the folder of axon_nb added."""

PROGRAM_PATH = Variable("PATH")
"""Searched for `nvidia-smi` and, for DeepSpeed, `ninja`. Ranks add the folder of their Python if `ninja` is only
there."""

TORCHRUN = Variables(("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"))
"""The identity of a process, set by `torchrun` and, on ranks, by axon_nb. `World.init()` and Horovod's `init()` read
them."""

OPEN_MPI = Variables(
    (
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
    )
)
"""The same, set by `mpirun` of Open MPI."""

MPICH = Variables(("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"))
"""The same, set by `mpirun` of MPICH and Intel MPI."""

SLURM = Variables(("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", "SLURM_NTASKS_PER_NODE"))
"""The same, set by `srun`."""

MASTER_ADDR = Variable("MASTER_ADDR")
"""Where the processes of a launcher meet. If it is not set: the first host of a Slurm job, or this host."""

MASTER_PORT = Variable("MASTER_PORT", default="29500")
"""The port at `MASTER_ADDR`."""

SLURM_HOSTS = Variable("SLURM_JOB_NODELIST")
"""The hosts of a Slurm job; the first one is used if `MASTER_ADDR` is not set."""

RUN_ID = Variable("TORCHELASTIC_RUN_ID")
"""`axon_nb` on ranks, where each rank draws its own row of `axon_nb.progress`; elsewhere only rank 0 draws one."""

NCCL_INTERFACE = Variable("NCCL_SOCKET_IFNAME", default="lo")
"""The network interface of NCCL's sockets. Ranks that are all on one host use loopback unless it is set."""

NCCL_RECOVERY = Variables(
    (
        "TORCH_DIST_USE_NCCL2",
        "TORCH_NCCL_USE_COMM_NONBLOCKING",
        "TORCH_NCCL_NONBLOCKING_TIMEOUT",
        "TORCH_FR_BUFFER_SIZE",
    )
)
"""NCCL ranks set them to `0`, `1`, `30` and `1000`, which recovery needs, unless they are set already."""

DEEPSPEED_ACCELERATOR = Variable("DS_ACCELERATOR", default="cpu")
"""What DeepSpeed computes on. Ranks on CPUs set it to `cpu` unless it is set already."""

ACCELERATE_PLUGINS = Variables(("ACCELERATE_USE_DEEPSPEED", "ACCELERATE_USE_FSDP"))
"""Set by Accelerate. Ranks on CPUs then say that they train with DistributedDataParallel instead."""
