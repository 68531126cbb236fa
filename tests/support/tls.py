"""Ports that take TLS as well as plain connections, for servers that were built without TLS."""

import asyncio
import ipaddress
import socket
import ssl
import threading
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Self

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec


def certificate(folder: Path, name: str = "ca") -> Path:
    """Write the certificate of 127.0.0.1 with its key into one file, which is also the authority that signed it."""
    key, now = ec.generate_private_key(ec.SECP256R1()), datetime.now(UTC)
    subject = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)])
    address = x509.IPAddress(ipaddress.IPv4Address("127.0.0.1"))
    signed = (
        x509.CertificateBuilder(subject, subject, key.public_key(), x509.random_serial_number())
        .not_valid_before(now - timedelta(minutes=5))
        .not_valid_after(now + timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([address]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    pem = serialization.Encoding.PEM
    plain = key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    file = folder / f"{name}.pem"
    file.write_bytes(signed.public_bytes(pem) + plain)
    return file


class TlsPort:
    """A port that passes on what comes, plain or by TLS, to the plain port of a server, as sentinels and replicas speak
    to it. Use it in a `with` block. `by_tls`: connections whose handshake has succeeded."""

    def __init__(self, port: int, to_port: int, certificate: Path) -> None:
        self.port, self._to_port = port, to_port
        self.by_tls = 0
        self._context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self._context.load_cert_chain(certificate)
        self._listening = socket.create_server(("127.0.0.1", port))
        self._listening.setblocking(False)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._listening.close()

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop), suppress(RuntimeError):
            self._loop.run_until_complete(self._accept())

    async def _accept(self) -> None:
        async with asyncio.TaskGroup() as group:
            while True:
                connection, _ = await self._loop.sock_accept(self._listening)
                group.create_task(self._pass_on(connection))

    async def _pass_on(self, connection: socket.socket) -> None:
        with suppress(OSError, asyncio.IncompleteReadError):
            first = await asyncio.to_thread(_first_byte, connection)
            is_tls = first == b"\x16"  # the type of a handshake's record
            reader = asyncio.StreamReader()
            transport, protocol = await self._loop.connect_accepted_socket(
                lambda: asyncio.StreamReaderProtocol(reader), connection, ssl=self._context if is_tls else None
            )
            self.by_tls += is_tls
            writer = asyncio.StreamWriter(transport, protocol, reader, self._loop)
            to_reader, to_writer = await asyncio.open_connection("127.0.0.1", self._to_port)
            copies = [asyncio.create_task(_copy(*way)) for way in ((reader, to_writer), (to_reader, writer))]
            await asyncio.wait(copies, return_when=asyncio.FIRST_COMPLETED)
            for each in (writer, to_writer):
                each.close()
            await asyncio.wait(copies)
            return
        connection.close()


def _first_byte(connection: socket.socket) -> bytes:
    connection.setblocking(True)
    try:
        return connection.recv(1, socket.MSG_PEEK)
    finally:
        connection.setblocking(False)


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with suppress(OSError):
        while data := await reader.read(65_536):
            writer.write(data)
            await writer.drain()
