"""Encryption of the files: AES-256-GCM, with a key for each file and a nonce for each of its parts.

The operator's key is never used itself. From it follow the key of each file, by a random salt that the file holds, and
the key of the digests in names, so that a guessed prompt cannot be checked against a name. `cryptography` is imported
only if there is a key."""

import base64
import binascii
import os
from collections.abc import Iterator
from typing import Any

TAG_BYTES = 16  # follow each encrypted part
# Bytes of one call into the library. It keeps Python's lock for about a tenth of a millisecond, and the reads and
# writes between two calls release the lock, so the engine's thread hardly waits.
CALL_BYTES = 256 << 10
_KEY_BYTES = 32


def decode_key(text: str) -> bytes:
    """Return the key that an operator has given in base64. Raises ValueError, with a message without the key."""
    try:
        key = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        key = b""
    if len(key) != _KEY_BYTES:
        raise ValueError(f"it must be {_KEY_BYTES} bytes in base64; `openssl rand -base64 {_KEY_BYTES}` makes a key")
    return key


def checked_key(text: str) -> str:
    """Return the text of a key as it is given. Raises ValueError if `decode_key` does."""
    decode_key(text)
    return text


class Encryption:
    """The operator's key. For several threads."""

    def __init__(self, key: bytes) -> None:
        """`key`: 32 bytes. Raises ImportError, with a message for the operator, if `cryptography` is not installed."""
        try:
            from cryptography.hazmat.primitives.ciphers import aead  # noqa: F401
        except ImportError as missing:
            message = "the package cryptography is missing; install the worker with its extra `encryption`"
            raise ImportError(message) from missing
        self._key = key
        self.digest_key = _derived(key, None, b"sluice-prefix names")

    def new_file(self, name: str) -> "FileCipher":
        """Return the cipher of a file that is to be written."""
        return self.file(name, os.urandom(32))

    def file(self, name: str, salt: bytes) -> "FileCipher":
        """Return the cipher of a file with this salt. `name` is bound to the content, which cannot be opened under
        another name."""
        return FileCipher(_derived(self._key, salt, b"sluice-prefix file"), salt, name)


class FileCipher:
    """Encrypts and decrypts the numbered parts of one file. A part is encrypted once."""

    def __init__(self, key: bytes, salt: bytes, name: str) -> None:
        from cryptography.hazmat.primitives.ciphers.algorithms import AES

        self._algorithm = AES(key)
        self.salt = salt
        self._name = name.encode()

    def encrypt(self, part: int, data: memoryview | bytes) -> Iterator[bytes]:
        """Yield the encrypted part in pieces, and then its tag."""
        encryptor = self._cipher(part).encryptor()
        encryptor.authenticate_additional_data(self._name)
        view = memoryview(data)
        for at in range(0, len(view), CALL_BYTES):
            yield encryptor.update(view[at : at + CALL_BYTES])
        encryptor.finalize()
        yield encryptor.tag

    def decryption(self, part: int) -> "_PartDecryption":
        """Return what decrypts a part, from its start."""
        decryptor = self._cipher(part).decryptor()
        decryptor.authenticate_additional_data(self._name)
        return _PartDecryption(decryptor)

    def decrypt(self, part: int, data: bytes) -> bytes | None:
        """Return the content of a short part with its tag; None if the key is wrong, or the part is damaged."""
        content = bytearray(data[:-TAG_BYTES])
        decryption = self.decryption(part)
        decryption.update(memoryview(content))
        return bytes(content) if decryption.verify(data[-TAG_BYTES:]) else None

    def _cipher(self, part: int) -> Any:
        from cryptography.hazmat.primitives.ciphers import Cipher
        from cryptography.hazmat.primitives.ciphers.modes import GCM

        return Cipher(self._algorithm, GCM(part.to_bytes(12, "big")))


class _PartDecryption:
    """Decrypts one part, piece by piece. What it has decrypted must not be used before `verify`."""

    def __init__(self, decryptor: Any) -> None:
        self._decryptor = decryptor

    def update(self, piece: memoryview) -> None:
        """Decrypt the next bytes in place."""
        if piece:
            piece[:] = self._decryptor.update(piece)

    def verify(self, tag: bytes) -> bool:
        """Return True if all bytes are those that were encrypted with this key."""
        from cryptography.exceptions import InvalidTag

        try:
            self._decryptor.finalize_with_tag(tag)
        except (InvalidTag, ValueError):  # ValueError: it is too short
            return False
        return True


def _derived(key: bytes, salt: bytes | None, use: bytes) -> bytes:
    from cryptography.hazmat.primitives.hashes import SHA256
    from cryptography.hazmat.primitives.kdf.hkdf import HKDF

    return HKDF(SHA256(), _KEY_BYTES, salt, use).derive(key)
