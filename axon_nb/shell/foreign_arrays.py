"""Arrays of other libraries than torch and NumPy, such as CuPy's, as NumPy arrays: through DLPack or NumPy's interface.

Neither their library nor torch is imported.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

_HOST = (1, 3)
"""DLPack's types of devices whose memory the CPU reads: its own, and pinned memory."""
_CUDA = 2


def is_on_device(value: Any) -> bool:
    """Whether this is an array of another library whose memory the CPU cannot read."""
    device = _dlpack_device(value)
    return device is not None and device[0] not in _HOST


def array_device(value: Any) -> str | None:
    """Return where an array of another library is, such as ``cuda:0``; None if it is no such array."""
    device = _dlpack_device(value)
    if device is None:
        return "cpu" if _has_interface(value) else None
    return "cpu" if device[0] in _HOST else f"{'cuda' if device[0] == _CUDA else 'device'}:{device[1]}"


def as_numpy(value: Any) -> Any:
    """Return an array of another library as a NumPy array.

    Raises:
        TypeError: none of the ways that such libraries offer works.
    """
    import numpy as np

    torch = sys.modules.get("torch")
    ways: list[Callable[[], Any]] = []
    if _has_interface(value):
        ways.append(lambda: np.asarray(value))
    elif is_on_device(value):
        if type(value).__module__.partition(".")[0] == "cupy":
            ways.append(value.get)  # it waits for what is queued, in every version
        ways.append(lambda: np.from_dlpack(value, device="cpu"))  # NumPy 2.1 and later
        if torch is not None:
            ways.append(lambda: torch.from_dlpack(value).cpu().numpy())
        ways.append(lambda: np.asarray(value))
    else:
        ways.append(lambda: np.from_dlpack(value))
    reasons = []
    for way in ways:
        try:
            array = way()
        except Exception as error:
            reasons.append(f"{type(error).__name__}: {error}")
            continue
        if isinstance(array, np.ndarray) and not array.dtype.hasobject:
            return array
    raise TypeError(f"{type(value).__name__} gives no NumPy array: {'; '.join(reasons)}")


def _has_interface(value: Any) -> bool:
    return not isinstance(value, type) and isinstance(getattr(value, "__array_interface__", None), dict)


def _dlpack_device(value: Any) -> tuple[int, int] | None:
    """Return DLPack's type and number of the device; None for tensors, NumPy arrays and other objects."""
    if not hasattr(type(value), "__dlpack_device__"):
        return None
    numpy, torch = sys.modules.get("numpy"), sys.modules.get("torch")
    if (numpy and isinstance(value, numpy.ndarray)) or (torch and isinstance(value, torch.Tensor)):
        return None
    try:
        kind, number = value.__dlpack_device__()
        return int(kind), int(number)
    except Exception:  # such as an array whose memory was donated
        return None
