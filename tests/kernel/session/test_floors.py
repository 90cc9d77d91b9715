"""Kernels whose packages are too old, or were upgraded while they ran: `%load_ext` says so, and loads nothing."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

import pytest

from tests.support.kernel import Kernel

MakeKernel = Callable[..., Kernel]


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """A folder that comes first in the kernel's path, with the metadata of what is installed there."""
    folder = tmp_path / "site"
    folder.mkdir()
    return folder


def install(site: Path, package: str, release: str) -> Path:
    """Record an installed package as pip does."""
    place = site / f"{package}-{release}.dist-info"
    place.mkdir()
    place.joinpath("METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: {release}\n")
    return place


def refusal(kernel: Kernel) -> str:
    """What `%load_ext axon_nb` says instead of loading."""
    reply = kernel.run("%load_ext axon_nb")
    assert reply.ename == "UsageError"
    assert "Traceback" not in reply.traceback
    assert kernel.value("[name for name in __import__('sys').modules if name.startswith('axon_nb.cluster')]") == []
    return reply.traceback.strip()


def test_package_below_its_floor_is_named_with_the_line_to_type(new_kernel: MakeKernel, site: Path) -> None:
    install(site, "ipywidgets", "7.6.5")
    assert refusal(new_kernel(PYTHONPATH=str(site))) == (
        "UsageError: axon_nb needs ipywidgets 7.7 or newer; got 7.6.5. "
        'Run `%pip install "ipywidgets>=7.7"`, then restart the kernel.'
    )


@pytest.mark.parametrize("package", ["ipykernel", "numpy"])
def test_kernel_whose_packages_were_upgraded_is_to_be_restarted(
    new_kernel: MakeKernel, site: Path, package: str
) -> None:
    kernel = new_kernel(PYTHONPATH=str(site))
    kernel.ok(f"import {package}")
    upgraded = install(site, package, "99.1.0")
    assert refusal(kernel) == (
        f"UsageError: This kernel runs {package} {version(package)}, and 99.1.0 is installed: restart the kernel."
    )
    shutil.rmtree(upgraded)
    kernel.ok("%load_ext axon_nb")
