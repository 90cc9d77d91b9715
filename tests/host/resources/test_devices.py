"""GPUs as reported by the driver's own program, in the order in which CUDA would list them."""

from __future__ import annotations

from pathlib import Path

import pytest

from axon_nb.host.resources import Gpu, list_gpus, mig_instances, visible_gpus
from tests.support.nvidia_smi import A100X4, MIG, MIG_R450, MIXED, Driver


@pytest.fixture
def driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Driver:
    """A machine with four cards."""
    driver = Driver(tmp_path, monkeypatch)
    driver.prints(A100X4)
    return driver


def test_all_gpus_are_listed_with_their_memory(driver: Driver) -> None:
    gpus = list_gpus()
    assert [gpu.index for gpu in gpus] == [0, 1, 2, 3]
    assert {gpu.name for gpu in gpus} == {"NVIDIA A100-SXM4-80GB"}
    assert {gpu.total_bytes for gpu in gpus} == {80 << 30}
    assert [gpu.used_bytes >> 20 for gpu in gpus] == [4, 79211, 4, 512]


def test_gpu_is_busy_above_half_a_gib_of_memory(driver: Driver) -> None:
    assert [gpu.busy for gpu in list_gpus()] == [False, True, False, False]


VISIBLE = [
    ("0,1,2,3", [0, 1, 2, 3]),
    ("3,1", [3, 1]),
    (" 2 , 0 ", [2, 0]),
    ("2", [2]),
    ("", []),
    ("-1", []),
    ("0,-1,1", [0]),
    ("1,7,2", [1]),
    ("one", []),
    ("GPU-f0e1d2c3-b4a5-9687-7869-5a4b3c2d1e0f,GPU-5c0e8f1a-3f6f-1b5e-9d0c-6a1f1d9a7b10", [3, 0]),
    ("GPU-8d2b", [1]),
    ("GPU-f0e1,GPU-5c,GPU-00", [3, 0]),
    ("GPU-00000000", []),
    ("MIG-8d2b6a44-7c1e-4f0b-8a3a-2b9e0c4d5f21", []),
    ("2,GPU-8d2b,0", [2, 1, 0]),
    ("0,GPU-none,1", [0]),
]


@pytest.mark.parametrize(("visible", "indices"), VISIBLE)
def test_cuda_visible_devices_order_is_respected(driver: Driver, visible: str, indices: list[int]) -> None:
    driver.shows(visible)
    assert [gpu.index for gpu in list_gpus()] == indices


@pytest.mark.parametrize("visible", ["1,1", "2,0,2", "GPU-8d2b,GPU-5c,GPU-8d2b6a44", "GPU-8d", "GPU-"])
def test_duplicate_or_ambiguous_entry_hides_all_gpus_as_in_cuda(driver: Driver, visible: str) -> None:
    driver.shows(visible)
    assert list_gpus() == []


FIRST, SECOND, OTHER = list(mig_instances(MIG.splitlines()))
BY_PARENT = "MIG-GPU-8d2b6a44-7c1e-4f0b-8a3a-2b9e0c4d5f21/1/0"
INSTANCES = [
    (FIRST, [(1, FIRST)]),
    (SECOND, [(1, SECOND)]),
    (OTHER, [(3, OTHER)]),
    (f" {OTHER} ", [(3, OTHER)]),
    (f"{SECOND},{OTHER}", [(1, SECOND), (3, OTHER)]),
    (f"{SECOND},0", [(1, SECOND), (0, "")]),
    (f"{FIRST},{FIRST}", []),
    (f"0,{FIRST},2", [(0, ""), (1, FIRST), (2, "")]),
    (f"MIG-none,{FIRST}", []),
    (FIRST[:12], []),
    ("MIG-", []),
    (BY_PARENT, [(1, BY_PARENT)]),
    ("MIG-GPU-5c0e8f1a-3f6f-1b5e-9d0c-6a1f1d9a7b10/1/0", []),
    ("MIG-GPU-8d2b6a44/1/0", []),
    ("MIG-GPU-8d2b6a44-7c1e-4f0b-8a3a-2b9e0c4d5f21", []),
    ("GPU-8d2b", [(1, FIRST), (1, SECOND)]),
    ("2,3", [(2, ""), (3, OTHER)]),
]
"""A value, and the number of each card with the instance that is used of it."""


@pytest.mark.parametrize(("visible", "expected"), INSTANCES)
def test_mig_instance_resolves_to_its_gpu(driver: Driver, visible: str, expected: list[tuple[int, str]]) -> None:
    driver.prints(A100X4, listing=MIG)
    driver.shows(visible)
    gpus = list_gpus()
    assert [(gpu.index, gpu.mig) for gpu in gpus] == expected
    assert [gpu.selector for gpu in gpus] == [mig or str(index) for index, mig in expected]
    assert not any(gpu.busy for gpu in gpus if gpu.mig), "what others use of the card is not the instance's"


def test_mig_instance_has_its_profile_name(driver: Driver) -> None:
    driver.prints(A100X4, listing=MIG)
    driver.shows(SECOND)
    assert [gpu.name for gpu in list_gpus()] == ["NVIDIA A100-SXM4-80GB MIG 1c.3g.40gb"]


def test_older_drivers_mig_instances_keep_listed_numbers() -> None:
    card = "GPU-5c0e8f1a-3f6f-1b5e-9d0c-6a1f1d9a7b10"
    cards, instances = {card: Gpu(0, "A100-SXM4-80GB", 80 << 30, 0)}, mig_instances(MIG_R450.splitlines())
    assert [gpu.mig for gpu in visible_gpus(f"MIG-{card}/2/0", cards, instances)] == [f"MIG-{card}/2/0"]
    assert visible_gpus(f"MIG-{card}/3/0", cards, instances) == []


def test_unlisted_mig_instances_are_ignored(driver: Driver) -> None:
    driver.shows(FIRST)
    assert list_gpus() == []


def test_malformed_lines_are_parsed_or_skipped(driver: Driver) -> None:
    driver.prints(MIXED)
    gpus = list_gpus()
    assert [(gpu.index, gpu.name) for gpu in gpus] == [(0, "NVIDIA GB10"), (1, "NVIDIA RTX A6000, Engineering Sample")]
    assert (gpus[0].total_bytes, gpus[0].used_bytes, gpus[0].busy) == (0, 0, False)
    assert gpus[1].total_bytes == 49140 << 20


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("", 0),
        ("No devices were found\n", 0),
        ("NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver.\n", 9),
        (A100X4, 15),
    ],
    ids=["nothing", "no devices", "no driver", "failed half-way"],
)
def test_unresponsive_driver_means_no_gpus(driver: Driver, text: str, code: int) -> None:
    driver.prints(text, code=code)
    assert list_gpus() == []


def test_missing_nvidia_smi_means_no_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert list_gpus() == []


def test_failing_nvidia_smi_means_no_gpus(driver: Driver, tmp_path: Path) -> None:
    (tmp_path / "nvidia-smi").write_text("#!/nowhere/at/all\n")
    assert list_gpus() == []
