"""Optional packages, and how to install them when a cell needs one."""

from __future__ import annotations

__all__ = ["missing_package"]

_INSTALLED_BY = {
    "accelerate": "axon_nb[frameworks]",
    "cupy": "axon_nb[gpu]",
    "deepspeed": "axon_nb[frameworks]",
    "pynvml": "axon_nb[gpu]",
    "tensorboard": "tensorboard",
    "transformers": "axon_nb[frameworks]",
}


def missing_package(module: str) -> str:
    """Return one sentence with the fix for a missing module; empty if axon_nb does not know the module.

    Args:
        module: As ``ModuleNotFoundError.name`` has it.
    """
    if module.partition(".")[0] == "horovod":
        return "Horovod does not build against today's torch: `import axon_nb.compat.horovod as hvd` has its API."
    requirement = _INSTALLED_BY.get(module)
    if requirement is None:
        return ""
    return (
        f'`{module}` is not installed where the ranks run: `pip install "{requirement}"` there, and run the cell again.'
    )
