"""Sends parts of local checkpoints from host to host, over a socket per process.

Not over the mesh: a collective would take device memory and wait for the running step. A process is
asked for a part by file name, and answers only peers that prove they know the start's secret, which
is never sent.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import secrets
import socket
import threading
from collections.abc import Callable
from pathlib import Path

import jax

from data.untrusted_files import parse_json
from trainer.checkpoint.local_part import Header, scratch_of, verify_part
from trainer.run.cluster import coordinator_address, exchange
from trainer.run.rendezvous import bind_address

_LONGEST_LINE = 4096  # bytes
_LINE_SECONDS = 10.0
_SILENT_SECONDS = 60.0  # after which a transfer counts as failed
_CHUNK = 1 << 20


class Hosts:
    """The hosts of a start's processes, and how each reaches the others."""

    def __init__(self, secret: str, find: Callable[[str], Path | None]) -> None:
        """Begins to serve this process's files; all processes call this.

        Args:
          secret, find: as in `PartServer`.
        """
        self.secret = secret
        self._server: PartServer | None = None
        address, port = "", 0
        if jax.process_count() > 1:
            listened, address = _addresses(jax.process_index())
            self._server = PartServer(listened, secret, find)
            port = self._server.port
        of_all = exchange([socket.gethostname(), address, port])
        self.names: list[str] = [name for name, _, _ in of_all]
        self._reached = [(address, port) for _, address, port in of_all]

    def fetch(self, process: int, name: str, target: Path) -> Header:
        """Copies a part from another process; see `fetch_part`."""
        return fetch_part(self._reached[process], self.secret, name, target)

    def close(self) -> None:
        """Stops serving files."""
        if self._server is not None:
            self._server.close()


class PartServer:
    """Serves this process's files to the others, from construction to `close`."""

    def __init__(self, host: str, secret: str, find: Callable[[str], Path | None]) -> None:
        """Listens on any free port.

        Args:
          host: the address of the interface to listen on; "::" for all.
          secret: of this start.
          find: returns a part's file by name; None if there is none.
        """
        self.secret, self.find = secret, find
        self.socket = socket.create_server(
            (host, 0),
            family=socket.AF_INET6 if ":" in host else socket.AF_INET,
            dualstack_ipv6=host == "::",
        )
        self.port: int = self.socket.getsockname()[1]
        self.thread = threading.Thread(target=self._accept, name="local parts", daemon=True)
        self.thread.start()

    def close(self) -> None:
        """Stops listening."""
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)  # ends a pending `accept`
        self.socket.close()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self.socket.accept()
            except OSError:
                return
            threading.Thread(
                target=self._serve, args=(connection,), name="local part", daemon=True
            ).start()

    def _serve(self, connection: socket.socket) -> None:
        """Sends one part, or closes the connection of a peer that may not have it."""
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError), connection:
            connection.settimeout(_LINE_SECONDS)
            challenge = secrets.token_hex()
            _send(connection, {"challenge": challenge})
            request = _receive(connection)
            name = str(request["part"])
            if not hmac.compare_digest(str(request["proof"]), _proof(self.secret, challenge, name)):
                return
            path = self.find(name)
            if path is None:
                return
            connection.settimeout(_SILENT_SECONDS)
            with path.open("rb") as file:
                _send(connection, {"size": path.stat().st_size})
                connection.sendfile(file)


def fetch_part(address: tuple[str, int], secret: str, name: str, target: Path) -> Header:
    """Copies a part from another process to `target`, compares its digest and returns its header.

    Raises:
      OSError: it cannot be reached, or does not send the whole part.
      DamagedError: the part has changed since it was written.
    """
    scratch = scratch_of(target)
    try:
        with (
            socket.create_connection(address, timeout=_LINE_SECONDS) as connection,
            scratch.open("wb") as file,
        ):
            try:
                challenge = str(_receive(connection)["challenge"])
                _send(connection, {"part": name, "proof": _proof(secret, challenge, name)})
                left = int(_receive(connection)["size"])
            except (ValueError, KeyError, TypeError) as error:
                raise OSError(f"{address[0]}:{address[1]} does not have {name}") from error
            connection.settimeout(_SILENT_SECONDS)
            while left and (piece := connection.recv(min(left, _CHUNK))):
                file.write(piece)
                left -= len(piece)
        if left:
            raise OSError(f"{address[0]}:{address[1]} broke off while sending {name}")
        header = verify_part(scratch)
        scratch.rename(target)
        return header
    finally:
        scratch.unlink(missing_ok=True)


def _addresses(process: int) -> tuple[str, str]:
    """Returns the address this process listens at, and the one others reach it at."""
    coordinator = coordinator_address()
    if process != 0:
        address = own_address(coordinator)
        return address, address
    listened = bind_address(coordinator).rpartition(":")[0].strip("[]")
    return listened, coordinator.rpartition(":")[0].strip("[]")


def own_address(coordinator: str) -> str:
    """Returns the address of the interface through which this machine reaches the coordinator.

    Args:
      coordinator: HOST:PORT of process 0.
    """
    host, _, port = coordinator.rpartition(":")
    for family, kind, _, _, address in socket.getaddrinfo(
        host.strip("[]"), int(port), type=socket.SOCK_DGRAM
    ):
        with contextlib.suppress(OSError), socket.socket(family, kind) as probe:
            probe.connect(address)  # sends nothing
            return str(probe.getsockname()[0])
    raise OSError(f"no interface of this machine leads to {coordinator}")


def _proof(secret: str, challenge: str, name: str) -> str:
    return hmac.new(secret.encode(), f"{challenge} {name}".encode(), "sha256").hexdigest()


def _send(connection: socket.socket, message: dict) -> None:
    connection.sendall(f"{json.dumps(message)}\n".encode())


def _receive(connection: socket.socket) -> dict:
    """Returns the next line's JSON, read byte by byte since what follows is not text."""
    line = b""
    while not line.endswith(b"\n") and len(line) < _LONGEST_LINE:
        if not (byte := connection.recv(1)):
            break
        line += byte
    return parse_json(line)
