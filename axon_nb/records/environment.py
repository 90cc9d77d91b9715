"""All environment variables that axon_nb reads, with defaults and descriptions.

`scripts/settings_table.py` generates the table in docs/settings.md from the docstrings here.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

from msgspec import Struct

_ON = ("1", "on", "true", "yes")
_OFF = ("0", "off", "false", "no")


class Variable(Struct, frozen=True):
    """One environment variable."""

    name: str
    default: str = ""
    """Value when unset."""

    def get(self, environ: Mapping[str, str] | None = None) -> str:
        """Return its value in `environ` (default: this process's environment)."""
        return (os.environ if environ is None else environ).get(self.name) or self.default

    def is_enabled(self) -> bool:
        """Whether a boolean variable is on; an unrecognised value means the default."""
        text = self.get().lower()
        return text in _ON if self.default.lower() in _OFF else text not in _OFF


class Variables(Struct, frozen=True):
    """A set of related environment variables."""

    names: tuple[str, ...]

    def first(self, environ: Mapping[str, str]) -> str:
        """Return the value of the first that is set in `environ`; empty if none is."""
        return next((environ[name] for name in self.names if environ.get(name)), "")


WARM_UP = Variable("AXON_NB_WARM_UP", default="1")
"""`0` turns the setting `warm_up` off from the start. Set it before `%load_ext axon_nb`."""

RUNTIME_DIR = Variable("AXON_NB_RUNTIME_DIR")
"""Folder for the clusters' sockets, keys and logs: a short path on a local disk. If it is not set, `XDG_RUNTIME_DIR` is
used, then the temporary folder."""

AGENT_SERVER = Variable("AXON_NB_AGENT_SERVER")
"""The socket of a process that forks host agents, for our own tests."""

JOIN_KEY = Variable("AXON_NB_JOIN_KEY")
"""The cluster's key, for `axon-nb host --join`."""

HOST_NAME = Variable("AXON_NB_HOST")
"""The name of this host in the cluster. The agent of a host that joined sets it for its ranks."""

HOST_IP = Variable("AXON_NB_HOST_IP")
"""The address of this host on which ranks on other hosts reach its own, where the way to the notebook does not show it.
`--hosts k8s` sets it in pods."""

K8S_TEMPLATE = Variable("AXON_NB_K8S_TEMPLATE")
"""The file with the Job that [`--hosts k8s`](howto/kubernetes.md) makes for each host; `axon-nb host --k8s-template`
prints the one that is used without it."""

CHECK = Variable("AXON_NB_CHECK", default="0")
"""`1` makes every collective of `axon_nb.comm` first check that all ranks make the same call with matching tensors, as
`checking()` does. Set it before the kernel or the script starts."""

CHECK_INPUTS = Variable("AXON_NB_CHECK_INPUTS", default="1")
"""`0` turns off what the notebook compares after a cell that calls a model that transformers has split over ranks: its
inputs, which must be [the same on all of them](howto/inside.md#ranks-must-agree)."""

OUTPUT_AT_END = Variable("AXON_NB_OUTPUT_AT_END", default="0")
"""`1` shows what ranks print when their cell ends, in an order that depends on what they print and not on when, so that
[two equal runs can be compared](howto/terminal.md#compare-two-runs-of-a-notebook). Set it before the cluster starts."""

CPU_BACKEND = Variable("AXON_NB_CPU_BACKEND", default="shm")
"""What `--backend auto` chooses for ranks on the CPUs of one host: `shm`, shared memory, or `gloo`, Gloo's sockets. See
[the design](design/shared_memory.md)."""

CONTAINERS = Variables(("KUBERNETES_SERVICE_HOST", "APPTAINER_CONTAINER", "SINGULARITY_CONTAINER"))
"""Set inside Kubernetes, Apptainer and Singularity: `axon-nb doctor` words its fixes accordingly."""

USER_CACHE = Variable("XDG_CACHE_HOME", "~/.cache")
"""Folder for cached self-test results, one per build of torch and Python, in `axon_nb/self_test`."""

USER_DATA = Variable("XDG_DATA_HOME", "~/.local/share")
"""Folder of what the course keeps of a learner, in `axon_nb/course.json`."""

CLASS = Variable("AXON_NB_CLASS", default="0")
"""`1` suits the settings to a machine that a class shares: no prewarmed agent, `keep_alive` 30 s, `idle_stop` 30 min,
one thread per rank. Set it before the kernels start."""

MAX_RANKS = Variable("AXON_NB_MAX_RANKS_PER_USER")
"""How many ranks a user may have at once, in all clusters of this host's notebooks. Set by the administrator before the
kernels start; a user can unset it. If it is not set, there is no limit."""

CLASS_DIR = Variable("AXON_NB_CLASS_DIR")
"""A folder that a class shares: each check of the course appends a line to a file there, under a nickname, and
`course.toml` there can lock solutions until a date. If it is not set, nothing leaves the user's folder."""

USER_RUNTIME_DIR = Variable("XDG_RUNTIME_DIR")
"""The user's folder for sockets, used if `AXON_NB_RUNTIME_DIR` is not set."""

TEMPORARY = Variables(("TMPDIR", "TEMP", "TMP"))
"""The temporary folder, as Python's `tempfile` finds it; used for sockets if neither of the two above is set."""

IPYTHON_DIR = Variable("IPYTHONDIR")
"""IPython's folder. If it (or `~/.ipython` if it is not set) is not writable, ranks use the cluster's folder."""

SESSION_NAME = Variable("JPY_SESSION_NAME")
"""The notebook's path, set by Jupyter. A cluster started without `--name` is named after it; without it, `default`."""

JUPYTER_SERVER = Variables(("JUPYTER_SERVER_URL", "JUPYTER_SERVER_ROOT"))
"""The address and folder of a Jupyter server, in its terminals: `axon-nb quickstart` prints the notebook's address."""

VISIBLE_GPUS = Variable("CUDA_VISIBLE_DEVICES")
"""The GPUs that `%distributed start` chooses from, in this order; all if it is not set."""

PYTHON_BREAKPOINT = Variable("PYTHONBREAKPOINT")
"""What `breakpoint()` calls on ranks, as in Python: 0 for nothing. Without it, the ranks pause."""

PYTHON_PATH = Variable("PYTHONPATH")
"""Passed to the host agent, with axon_nb's folder appended."""

PROGRAM_PATH = Variable("PATH")
"""Searched for `nvidia-smi` and, for DeepSpeed, `ninja`. If only the ranks' Python environment has `ninja`, ranks add
its folder."""

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

SLURM = Variables(("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", "SLURM_NODEID"))
"""The same, set by `srun`: with the index of the host instead of the number of its ranks."""

SLURM_TASKS = Variables(("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE", "SLURM_NTASKS_PER_NODE"))
"""The number of ranks on each host, such as `2(x2),1`: the first of these that is set."""

MASTER_ADDR = Variable("MASTER_ADDR")
"""Rendezvous host of the launcher's processes: that of rank 0. Default: the first host of the Slurm step, or this host
if all ranks run on it."""

MASTER_PORT = Variable("MASTER_PORT", default="29500")
"""The rendezvous port at `MASTER_ADDR`."""

SLURM_HOSTS = Variables(("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST"))
"""The hosts of a Slurm step or job, such as `n[1-3,7],m2-gpu[01-02]`: the first one is used if `MASTER_ADDR` is not
set."""

SLURM_JOB = Variable("SLURM_JOB_ID")
"""The Slurm job in which the notebook runs: `--hosts slurm` starts ranks on its other nodes."""

SLURM_NODE = Variable("SLURMD_NODENAME")
"""The name of this host in Slurm."""

EXTENSIONS = Variable("TORCH_EXTENSIONS_DIR")
"""torch's folder for what `load_inline` builds. Ranks add one in it for each source."""

RUN_ID = Variable("TORCHELASTIC_RUN_ID")
"""`axon_nb` on ranks, where every rank shows `axon_nb.progress`; elsewhere only rank 0 does."""

NCCL_INTERFACE = Variable("NCCL_SOCKET_IFNAME", default="lo")
"""The network interface of NCCL's sockets. Ranks that are all on one host use loopback unless it is set."""

NCCL_RECOVERY = Variables(
    (
        "TORCH_DIST_USE_NCCL2",
        "TORCH_NCCL_USE_COMM_NONBLOCKING",
        "TORCH_FR_BUFFER_SIZE",
    )
)
"""NCCL ranks set them to `0`, `1` and `1000`, as recovery needs, unless already set."""

DEEPSPEED_ACCELERATOR = Variable("DS_ACCELERATOR", default="cpu")
"""DeepSpeed's accelerator. CPU ranks set it to `cpu` unless already set."""

ACCELERATE_PLUGINS = Variables(("ACCELERATE_USE_DEEPSPEED", "ACCELERATE_USE_FSDP"))
"""Set by Accelerate. CPU ranks then report that they train with DistributedDataParallel instead."""
