"""Telling ipyparallel's controller that an engine is gone: by itself it misses one after half a minute."""

from __future__ import annotations

import json
from pathlib import Path

__all__ = ["tell_controller"]

_LINGER_MS = 200


def tell_controller(engine_file: Path, rank: int) -> None:
    """Unregister the engine `rank`.

    Args:
        engine_file: The controller's connection file for engines.
        rank: The engine's id.

    Raises:
        OSError: there is no such file, or no way to the controller.
        KeyError: the file is not as ipyparallel 9 writes it, or the controller encrypts.
    """
    import zmq
    from jupyter_client.session import Session

    facts = json.loads(engine_file.read_text())
    if facts.get("curve_serverkey"):
        raise KeyError("curve_serverkey")
    session = Session(key=facts["key"].encode(), signature_scheme=facts["signature_scheme"])
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.linger = _LINGER_MS
        try:
            socket.connect(f"{facts['interface']}:{facts['registration']}")
            session.send(socket, "unregistration_request", content={"id": rank})
        except zmq.ZMQError as error:
            raise OSError(str(error)) from None
