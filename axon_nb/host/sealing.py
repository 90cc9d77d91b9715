"""A TCP connection to the rendezvous store: both ends prove that they know the cluster's key, and sign each message.

Only clusters whose ranks are on several hosts use it; the key itself never travels. HMAC-SHA256 (RFC 2104) with a key
of its own for each connection and direction, and a number in each signature, so that nothing can be sent again.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import socket

from axon_nb.host.framing import encode

__all__ = ["NONCE_SIZE", "PROOF_SIZE", "Handshake", "Seal", "greet", "store_key"]

NONCE_SIZE = 32
PROOF_SIZE = 32


def store_key(cluster_key: bytes) -> bytes:
    """The store's key, from the one with which ipyparallel signs the cluster's messages: both ends have that."""
    return _sign(cluster_key, b"axon_nb rendezvous store")


def _sign(key: bytes, *parts: bytes) -> bytes:
    return hmac.new(key, b"".join(parts), hashlib.sha256).digest()


class Seal:
    """Signs the messages that one end sends, checks those that it gets."""

    def __init__(self, sending: bytes, receiving: bytes) -> None:
        self._keys = (sending, receiving)
        self._sent = self._received = 0

    def close(self, parts: list[bytes]) -> list[bytes]:
        """The message with its signature as one more part."""
        self._sent += 1
        return [*parts, _sign(self._keys[0], self._sent.to_bytes(8, "big"), encode(parts))]

    def open(self, parts: list[bytes]) -> list[bytes]:
        """The message without its signature.

        Raises:
            ValueError: the signature is not the one that this message has here.
        """
        self._received += 1
        *content, proof = parts or [b""]
        expected = _sign(self._keys[1], self._received.to_bytes(8, "big"), encode(content))
        if not hmac.compare_digest(proof, expected):
            raise ValueError("a store message whose signature is wrong")
        return content


class Handshake:
    """The store's end of the greeting: send `challenge`, give the answer to `check`."""

    def __init__(self, key: bytes) -> None:
        self._key = key
        self.challenge = os.urandom(NONCE_SIZE)

    def check(self, answer: bytes) -> tuple[bytes, Seal]:
        """The proof to send back, and the seal of the connection.

        Args:
            answer: The client's nonce and its proof, `NONCE_SIZE` + `PROOF_SIZE` bytes.

        Raises:
            ValueError: the other side does not know the key.
        """
        nonce, proof = answer[:NONCE_SIZE], answer[NONCE_SIZE:]
        session = _sign(self._key, self.challenge, nonce)
        if not hmac.compare_digest(proof, _sign(session, b"rank")):
            raise ValueError("a store client that does not know the key")
        return _sign(session, b"store"), Seal(_sign(session, b"to rank"), _sign(session, b"to store"))


def greet(sock: socket.socket, key: bytes) -> Seal:
    """The rank's end of the greeting, on a blocking socket.

    Raises:
        ConnectionError: the other side is no store that knows the key.
    """
    challenge = _exactly(sock, NONCE_SIZE)
    nonce = os.urandom(NONCE_SIZE)
    session = _sign(key, challenge, nonce)
    sock.sendall(nonce + _sign(session, b"rank"))
    if not hmac.compare_digest(_exactly(sock, PROOF_SIZE), _sign(session, b"store")):
        raise ConnectionError("the rendezvous store does not know the cluster's key")
    return Seal(_sign(session, b"to store"), _sign(session, b"to rank"))


def _exactly(sock: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        chunk = sock.recv(size - len(data))
        if not chunk:
            raise ConnectionError("the rendezvous store closed the connection: the cluster's key is another one")
        data += chunk
    return data
