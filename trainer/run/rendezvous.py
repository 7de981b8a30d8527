"""The processes of a cluster meet at the coordinator's address before JAX does, which would wait long and end in an abort."""
from __future__ import annotations

import contextlib
import json
import socket
import sys
import time

from data.errors import TransientError, UserError
from data.printable import printable
from trainer.run.outcome import error_with, outcome_of

# How long processes wait for each other: on one machine they start together, on several an image may have to be fetched.
LOCAL_SECONDS = 60
SECONDS = 300
_GO = "go"


def meet(address: str, process: int, processes: int, seconds: float | None = None) -> None:
    """Returns once all processes have called this, the coordinator's port being free again.

    Args:
      address: HOST:PORT of process 0.
      process: number of this process.
      processes: number of all processes.
      seconds: how long to wait; LOCAL_SECONDS or SECONDS unless given.

    Raises:
      TransientError: a process does not come in time, or the port is in use.
      UserError: the address cannot be used, or two processes say that they are the same.
    """
    host, port = _split(address)
    if seconds is None:
        seconds = LOCAL_SECONDS if host in ("localhost", "127.0.0.1", "::1") else SECONDS
    deadline = time.monotonic() + seconds
    if process == 0:
        _gather(address, port, processes, deadline, seconds)
    else:
        _report(address, (host, port), process, processes, deadline, seconds)


def _split(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    if not port.isdecimal() or not 0 < int(port) < 65536:
        raise UserError(f"distributed.coordinator: found {address}, needs HOST:PORT of process 0 with a port of 1 .. 65535")
    return host.strip("[]"), int(port)


def _gather(address: str, port: int, processes: int, deadline: float, seconds: float) -> None:
    """Process 0 waits for all others, and tells them to go on or why not."""
    arrived: dict[int, socket.socket] = {}
    refused: list[socket.socket] = []
    problem: UserError | None = None
    with _listening(address, port) as server:
        while len(arrived) < processes - 1 and problem is None:
            server.settimeout(max(deadline - time.monotonic(), 0.01))
            try:
                connection, number, count = _accept_one(server)
            except TimeoutError:
                missing = [number for number in range(1, processes) if number not in arrived]
                if time.monotonic() >= deadline:
                    problem = TransientError(
                        f"process{'es' * (len(missing) > 1)} {', '.join(map(str, missing))} of {processes} did not come to "
                        f"process 0 at {address} within {seconds:.0f} s; start all of them with the same "
                        "distributed.coordinator and num_processes")
                continue
            except (OSError, ValueError, KeyError, TypeError):
                continue  # not one of ours
            if count != processes:
                problem = UserError(
                    f"process {number} was started with distributed.num_processes {count}, process 0 with {processes}")
            elif number in arrived:
                problem = UserError(
                    f"two processes at {address} have distributed.process_id {number}; each needs a number of its own")
            if problem:
                refused.append(connection)
            else:
                arrived[number] = connection
    _answer([*arrived.values(), *refused], _GO if problem is None else json.dumps(outcome_of(problem)))
    if problem:
        raise problem


def _listening(address: str, port: int) -> socket.socket:
    """Returns a socket that listens at a port of this machine, by IPv6 too where there is any."""
    try:
        if socket.has_dualstack_ipv6():
            return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True)
        return socket.create_server(("", port))
    except OSError as error:
        raise UserError(f"process 0: cannot listen at distributed.coordinator {address} ({error.strerror}); another port would "
                        "work, the same for all processes") from None


def _accept_one(server: socket.socket) -> tuple[socket.socket, int, int]:
    """Returns the next connection, with the number of its process and the number of processes that it was started with."""
    connection, _ = server.accept()
    connection.settimeout(5)
    message = json.loads(_receive(connection))
    return connection, message["process"], message["of"]


def _answer(connections: list[socket.socket], answer: str) -> None:
    """Sends a line to each, and closes them."""
    for connection in connections:
        with contextlib.suppress(OSError):
            connection.sendall(f"{answer}\n".encode())
            _receive(connection)  # the other side closes first, so that the port is not kept for a while
        connection.close()


def _report(
    address: str, coordinator: tuple[str, int], process: int, processes: int, deadline: float, seconds: float
) -> None:
    """Every other process tells process 0 that it is there, and waits for its answer."""
    has_printed, problem = False, "no answer"
    while (left := deadline - time.monotonic()) > 0:
        try:
            with socket.create_connection(coordinator, timeout=min(left, 5)) as connection:
                connection.sendall((json.dumps({"process": process, "of": processes}) + "\n").encode())
                connection.settimeout(left + 5)
                answer = _receive(connection)
            if answer == _GO:
                return
            if answer:
                code, message = json.loads(answer)
                raise error_with(code, printable(message))
            problem = "it ended without an answer"
        except OSError as error:
            problem = error.strerror or str(error)
        if not has_printed and time.monotonic() > deadline - seconds + 5:
            print(f"process {process}: waiting for process 0 at {address} for up to {seconds:.0f} s", file=sys.stderr)
            has_printed = True
        time.sleep(min(0.2, max(left, 0)))
    raise TransientError(
        f"process {process}: process 0 was not reached at distributed.coordinator {address} within {seconds:.0f} s "
        f"({problem}); start it too, with an address and port that this machine can reach")


def _receive(connection: socket.socket) -> str:
    """Returns a line from the other side, or '' if it has closed the connection."""
    line = b""
    while not line.endswith(b"\n") and len(line) < 10_000:
        part = connection.recv(4096)
        if not part:
            break
        line += part
    return line.decode("utf-8", "replace").rstrip("\n")
