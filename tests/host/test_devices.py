"""GPUs as reported by the driver's own program, in the order in which CUDA would list them."""

from __future__ import annotations

from pathlib import Path

import pytest

from axon_nb.host.devices import list_gpus
from tests.host.nvidia_smi import A100X4, MIXED, Driver


@pytest.fixture
def driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Driver:
    """A machine with four cards."""
    driver = Driver(tmp_path, monkeypatch)
    driver.prints(A100X4)
    return driver


def test_all_cards_with_their_memory(driver: Driver) -> None:
    gpus = list_gpus()
    assert [gpu.index for gpu in gpus] == [0, 1, 2, 3]
    assert {gpu.name for gpu in gpus} == {"NVIDIA A100-SXM4-80GB"}
    assert {gpu.total_bytes for gpu in gpus} == {80 << 30}
    assert [gpu.used_bytes >> 20 for gpu in gpus] == [4, 79211, 4, 512]


def test_a_card_is_busy_when_more_than_half_a_gib_of_it_is_used(driver: Driver) -> None:
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
]


@pytest.mark.parametrize(("visible", "indices"), VISIBLE)
def test_the_users_choice_is_followed_in_its_order(driver: Driver, visible: str, indices: list[int]) -> None:
    driver.shows(visible)
    assert [gpu.index for gpu in list_gpus()] == indices


@pytest.mark.parametrize("visible", ["1,1", "2,0,2", "GPU-8d2b,GPU-5c,GPU-8d2b6a44", "GPU-8d", "GPU-"])
def test_a_duplicate_or_ambiguous_entry_hides_all_gpus_as_in_cuda(driver: Driver, visible: str) -> None:
    driver.shows(visible)
    assert list_gpus() == []


def test_odd_lines_are_parsed_or_skipped(driver: Driver) -> None:
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
    ids=["nothing", "no devices", "no driver", "failed in the middle"],
)
def test_an_unresponsive_driver_means_no_gpu(driver: Driver, text: str, code: int) -> None:
    driver.prints(text, code=code)
    assert list_gpus() == []


def test_without_the_program_there_is_no_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert list_gpus() == []


def test_a_program_that_cannot_be_run_means_no_gpu(driver: Driver, tmp_path: Path) -> None:
    (tmp_path / "nvidia-smi").write_text("#!/nowhere/at/all\n")
    assert list_gpus() == []
