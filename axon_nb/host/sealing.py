"""Authentication of TCP connections to the rendezvous store: both ends prove that they know the key and sign messages.

Only clusters with ranks on several hosts use it. The key itself is never sent. Signatures are HMAC-SHA256 (RFC 2104)
with a separate key per connection and direction, and each includes a sequence number, which prevents replay.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import socket

from axon_nb.host.framing import encode

__all__ = ["NONCE_SIZE", "PROOF_SIZE", "Handshake", "MessageSigner", "authenticate", "store_key"]

NONCE_SIZE = 32
PROOF_SIZE = 32


def store_key(cluster_key: bytes) -> bytes:
    """Derive the store's key from the key that signs ipyparallel's messages, which both ends already have."""
    return _sign(cluster_key, b"axon_nb rendezvous store")


def _sign(key: bytes, *parts: bytes) -> bytes:
    return hmac.new(key, b"".join(parts), hashlib.sha256).digest()


class MessageSigner:
    """Signs the messages that one end sends and verifies those it receives."""

    def __init__(self, sending: bytes, receiving: bytes) -> None:
        self._keys = (sending, receiving)
        self._sent = self._received = 0

    def sign(self, parts: list[bytes]) -> list[bytes]:
        """Return the message with its signature appended as a part."""
        self._sent += 1
        return [*parts, _sign(self._keys[0], self._sent.to_bytes(8, "big"), encode(parts))]

    def verify(self, parts: list[bytes]) -> list[bytes]:
        """Check the signature and return the message without it.

        Raises:
            ValueError: the signature is wrong, or the message was replayed.
        """
        self._received += 1
        *content, proof = parts or [b""]
        expected = _sign(self._keys[1], self._received.to_bytes(8, "big"), encode(content))
        if not hmac.compare_digest(proof, expected):
            raise ValueError("store message with a wrong signature")
        return content


class Handshake:
    """The store's side of the handshake: send `challenge`, then pass the reply to `check`."""

    def __init__(self, key: bytes) -> None:
        self._key = key
        self.challenge = os.urandom(NONCE_SIZE)

    def check(self, answer: bytes) -> tuple[bytes, MessageSigner]:
        """Verify a client's reply; return the proof to send back and the connection's signer.

        Args:
            answer: The client's nonce and its proof, `NONCE_SIZE` + `PROOF_SIZE` bytes.

        Raises:
            ValueError: the client does not know the key.
        """
        nonce, proof = answer[:NONCE_SIZE], answer[NONCE_SIZE:]
        session = _sign(self._key, self.challenge, nonce)
        if not hmac.compare_digest(proof, _sign(session, b"rank")):
            raise ValueError("the store client does not know the key")
        return _sign(session, b"store"), MessageSigner(_sign(session, b"to rank"), _sign(session, b"to store"))


def authenticate(sock: socket.socket, key: bytes) -> MessageSigner:
    """Perform the rank's side of the handshake on a blocking socket.

    Raises:
        ConnectionError: the peer closed the connection or does not know the key.
    """
    challenge = _exactly(sock, NONCE_SIZE)
    nonce = os.urandom(NONCE_SIZE)
    session = _sign(key, challenge, nonce)
    sock.sendall(nonce + _sign(session, b"rank"))
    if not hmac.compare_digest(_exactly(sock, PROOF_SIZE), _sign(session, b"store")):
        raise ConnectionError("the rendezvous store does not know the cluster's key")
    return MessageSigner(_sign(session, b"to store"), _sign(session, b"to rank"))


def _exactly(sock: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        chunk = sock.recv(size - len(data))
        if not chunk:
            raise ConnectionError("the rendezvous store closed the connection: the cluster's key does not match")
        data += chunk
    return data
