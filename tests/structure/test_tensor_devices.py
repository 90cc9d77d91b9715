"""What `scripts/devices.py` finds: tensors that are made without a device."""

from __future__ import annotations

import pytest

from scripts.devices import files, places


@pytest.mark.parametrize(
    "source",
    [
        "x = torch.zeros(3)",
        "f(torch.tensor([1], dtype=torch.int64))",
        "torch.randn(2).to(torch.float64) + torch.ones(2)",
        "with torch.autocast('cpu'): pass",
        "torch.amp.GradScaler('cuda')",
    ],
)
def test_tensor_without_a_device_is_reported(source: str) -> None:
    assert [line for line, _ in places(source)] == [1]


@pytest.mark.parametrize(
    "source",
    [
        "torch.zeros(3, device=device)",
        "torch.zeros(3, device='cpu')",
        "torch.zeros(3, **options)",
        "(torch.tensor(values)[order] / 16).to(device)",
        "torch.zeros_like(x)",
        "torch.frombuffer(data, dtype=torch.uint8)",
        "np.zeros(3)",
        "torch.autocast(device.type)",
    ],
)
def test_tensor_with_a_device_is_accepted(source: str) -> None:
    assert list(places(source)) == []


def test_examples_and_library_name_their_devices() -> None:
    searched = files()
    assert {"examples", "comm", "engine", "parallel"} <= {part for path in searched for part in path.parts}
    assert [(str(path), place) for path in searched for place in places(path.read_text("utf-8"))] == []
