"""A rendezvous of a cluster's processes before JAX's own, which would wait long and abort.

They meet at the coordinator's address. Anyone who reaches the port may connect: a thread per
connection reads one short line, answers with a random challenge, and trusts the line only with a
proof made from the challenge and the run's token, if any (`shared_token`). So replaying a line is
useless, and the token is never sent. One deadline covers all.
"""

from __future__ import annotations

import contextlib
import hmac
import ipaddress
import json
import secrets
import socket
import sys
import threading
import time
from collections.abc import Callable
from typing import NamedTuple

from data.errors import TransientError, UserError
from data.printable import printable
from data.within import parse_json
from trainer.run.outcome import error_with, outcome_of
from trainer.run.shared_token import TOKEN, TOKEN_FILE

# How long processes wait for each other: on one machine they start together; several machines may
# have to fetch an image.
LOCAL_SECONDS = 60
SECONDS = 300
REPORT_SECONDS = 15  # between process 0's lines about absent processes
_GO = "go"
_LONGEST_LINE = 4096  # bytes
_LINE_SECONDS = 5.0  # seconds to receive a connection's line
_CONNECTIONS = 4096  # connections served at a time; more are turned away
_PAUSE_SECONDS = 0.1  # pause after a connection for which there was no file handle or thread
_LOCAL_HOSTS = ("localhost", "127.0.0.1", "::1")


class _Arrival(NamedTuple):
    """A connection's claims about its process."""

    number: int
    processes: int
    """The number of processes it was started with."""

    def proof(self, challenge: str, token: str) -> str:
        """The answer to a challenge that only a process with the token can give."""
        claims = f"{challenge} {self.number} {self.processes}"
        return hmac.new(token.encode("utf-8", "replace"), claims.encode(), "sha256").hexdigest()


def meet(
    address: str,
    process: int,
    processes: int,
    seconds: float | None = None,
    token: str | Callable[[], str] = "",
) -> None:
    """Returns once all processes have called this and the coordinator's port is free again.

    Args:
      address: HOST:PORT of process 0.
      process: number of this process.
      processes: number of all processes.
      seconds: how long to wait; LOCAL_SECONDS or SECONDS by default.
      token: the run's, without which no process is trusted; or a function that returns it, called
        when process 0 has answered.

    Raises:
      TransientError: a process does not arrive in time, or the port is in use.
      UserError: the address cannot be used, or two processes claim the same number.
    """
    host, port = _split(address)
    if seconds is None:
        seconds = LOCAL_SECONDS if host in _LOCAL_HOSTS else SECONDS
    deadline = time.monotonic() + seconds
    find_token = token if callable(token) else lambda: token
    if process == 0:
        _Gathering(address, (host, port), processes, deadline, seconds, find_token()).run()
    else:
        arrival = _Arrival(process, processes)
        _report(address, (host, port), arrival, find_token, deadline, seconds)


def bind_address(address: str) -> str:
    """Returns the HOST:PORT for JAX's coordinator to listen on: the named interface, or all
    interfaces if the name belongs to none of this machine's, as behind a load balancer.
    """
    host, port = _split(address)
    family, ip = _own_interface(host, port) or (socket.AF_INET6, "::")
    return f"[{ip}]:{port}" if family == socket.AF_INET6 else f"{ip}:{port}"


def _split(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    if not port.isdecimal() or not port.isascii() or not 0 < int(port) < 65536:
        raise UserError(
            f"distributed.coordinator: found {address}, needs HOST:PORT of process 0 with a port "
            "of 1 .. 65535"
        )
    return host.strip("[]"), int(port)


def _own_interface(host: str, port: int) -> tuple[int, str] | None:
    """The family and address of the local interface with this name; None if there is none.

    None also for a loopback address, as a machine often resolves its name to: other machines cannot
    reach it.
    """
    if not host:
        return None
    only_here = host in _LOCAL_HOSTS or host.startswith("127.")
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError:
        return None
    for family, _, _, _, address in found:
        if not only_here and ipaddress.ip_address(str(address[0]).partition("%")[0]).is_loopback:
            continue
        with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.bind((address[0], 0))
            return family, str(address[0])
    return None


class _Gathering:
    """Process 0 waits for all others, then tells them to proceed, or why not."""

    def __init__(
        self,
        address: str,
        coordinator: tuple[str, int],
        processes: int,
        deadline: float,
        seconds: float,
        token: str,
    ) -> None:
        self.address = address
        self.processes = processes
        self.deadline = deadline
        self.seconds = seconds
        self.token = token
        self.host, self.port = coordinator
        self.arrived: dict[int, socket.socket] = {}
        self.refused: list[socket.socket] = []
        self.problem: UserError | None = None
        self.changed = threading.Condition()
        self.slots = threading.BoundedSemaphore(_CONNECTIONS)

    def run(self) -> None:
        """Returns when all have arrived; errors as `meet`."""
        with self._listening() as server:
            accepting = threading.Thread(
                target=self._accept, args=(server,), name="rendezvous", daemon=True
            )
            accepting.start()
            with self.changed:
                self._wait()
                problem, connections = self.problem, [*self.arrived.values(), *self.refused]
                self.deadline = 0.0  # late arrivals are turned away
            with contextlib.suppress(OSError):
                # Ends a pending `accept`, which would keep the port in use.
                server.shutdown(socket.SHUT_RDWR)
            accepting.join()
        _answer(connections, _GO if problem is None else json.dumps(outcome_of(problem)))
        if problem:
            raise problem

    def _wait(self) -> None:
        """Waits until all have arrived, an error, or the deadline; reports absent processes."""
        report = time.monotonic() + REPORT_SECONDS
        while not self._all_are_here() and self.problem is None:
            now = time.monotonic()
            if now >= self.deadline:
                self.problem = TransientError(
                    f"{self._absent()} did not reach process 0 at {self.address} within "
                    f"{self.seconds:.0f} s; start all of them with the same "
                    "distributed.coordinator and num_processes"
                )
                return
            if now >= report:
                print(
                    f"process 0: {self._absent()} missing; waiting for up to "
                    f"{self.deadline - now:.0f} s more",
                    file=sys.stderr,
                    flush=True,
                )
                report = now + REPORT_SECONDS
            self.changed.wait(min(self.deadline, report) - now)

    def _all_are_here(self) -> bool:
        """Whether all others have arrived and none has left again, as in a restart."""
        if len(self.arrived) < self.processes - 1:
            return False
        for number in [
            number for number, connection in self.arrived.items() if _has_left(connection)
        ]:
            self.arrived.pop(number).close()
        return len(self.arrived) == self.processes - 1

    def _absent(self) -> str:
        missing = [number for number in range(1, self.processes) if number not in self.arrived]
        return (
            f"process{'es' * (len(missing) > 1)} {', '.join(map(str, missing))} of {self.processes}"
        )

    def _listening(self) -> socket.socket:
        """Returns a socket that listens at the coordinator's address, or else on all interfaces."""
        try:
            family, ip = _own_interface(self.host, self.port) or (None, "")
            if family is not None:
                return socket.create_server((ip, self.port), family=family, backlog=_CONNECTIONS)
            if socket.has_dualstack_ipv6():
                return socket.create_server(
                    ("", self.port),
                    family=socket.AF_INET6,
                    dualstack_ipv6=True,
                    backlog=_CONNECTIONS,
                )
            return socket.create_server(("", self.port), backlog=_CONNECTIONS)
        except OSError as error:
            raise UserError(
                f"process 0: cannot listen at distributed.coordinator {self.address} "
                f"({error.strerror}); another port would work, the same for all processes"
            ) from None

    def _accept(self, server: socket.socket) -> None:
        """The thread that accepts connections until the server is closed."""
        while True:
            try:
                connection, _ = server.accept()
            except OSError:
                if time.monotonic() >= self.deadline:  # `run` has closed the server
                    return
                time.sleep(_PAUSE_SECONDS)  # strangers briefly hold all file handles
                continue
            if not self.slots.acquire(blocking=False):
                connection.close()
                continue
            try:
                threading.Thread(
                    target=self._serve, args=(connection,), name="rendezvous", daemon=True
                ).start()
            except RuntimeError:  # no more threads
                connection.close()
                self.slots.release()
                time.sleep(_PAUSE_SECONDS)

    def _serve(self, connection: socket.socket) -> None:
        """Reads a connection's line; silently turns away all but the run's processes."""
        try:
            arrival = _read_arrival(
                connection, min(self.deadline, time.monotonic() + _LINE_SECONDS), self.token
            )
            if arrival is None or not self._take(arrival, connection):
                connection.close()
        finally:
            self.slots.release()

    def _take(self, arrival: _Arrival, connection: socket.socket) -> bool:
        """Counts an arrival if others are missing; returns whether to keep the connection."""
        number, count = arrival.number, arrival.processes
        with self.changed:
            if (
                self.problem is not None
                or time.monotonic() >= self.deadline
                or not 1 <= number < max(count, self.processes)
            ):
                return False
            if count != self.processes:
                self.problem = UserError(
                    f"process {number} was started with distributed.num_processes {count}, "
                    f"process 0 with {self.processes}"
                )
            elif number in self.arrived and not _has_left(self.arrived[number]):
                self.problem = UserError(
                    f"two processes at {self.address} have distributed.process_id {number}; each "
                    "needs a unique number"
                )
            if self.problem:
                self.refused.append(connection)
            else:
                self.arrived[number] = connection
            self.changed.notify()
            return True


def _has_left(connection: socket.socket) -> bool:
    """Whether the other side has closed the connection because its process was restarted."""
    connection.setblocking(False)
    try:
        return not connection.recv(1, socket.MSG_PEEK)
    except BlockingIOError:
        return False
    except OSError:
        return True


def _read_arrival(connection: socket.socket, deadline: float, token: str) -> _Arrival | None:
    """A connection's claim before a deadline; None if it is not one of the run's processes."""
    try:
        message = parse_json(_receive(connection, deadline))
        arrival = _Arrival(message["process"], message["of"])
        if any(type(number) is not int for number in arrival):
            return None
        challenge = secrets.token_hex()
        connection.sendall(f"{json.dumps({'challenge': challenge})}\n".encode())
        answer = _receive(connection, deadline)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    right = hmac.compare_digest(answer.encode(), arrival.proof(challenge, token).encode())
    return arrival if right else None


def _answer(connections: list[socket.socket], answer: str) -> None:
    """Sends a line to each connection; closes them after the other side, or a moment later."""
    deadline = time.monotonic() + _LINE_SECONDS
    for connection in connections:
        with contextlib.suppress(OSError):
            connection.settimeout(max(deadline - time.monotonic(), 0.01))
            connection.sendall(f"{answer}\n".encode())
    for connection in connections:
        with contextlib.suppress(OSError):
            # The other side closes first, so that the port is free at once.
            _receive(connection, deadline)
        connection.close()


def _report(
    address: str,
    coordinator: tuple[str, int],
    arrival: _Arrival,
    find_token: Callable[[], str],
    deadline: float,
    seconds: float,
) -> None:
    """Every other process reports to process 0, and waits for its answer."""
    process, has_printed, problem = arrival.number, False, "no answer"
    message = json.dumps({"process": process, "of": arrival.processes})
    while (left := deadline - time.monotonic()) > 0:
        try:
            with socket.create_connection(coordinator, timeout=min(left, 5)) as connection:
                connection.sendall(f"{message}\n".encode())
                answer = _receive(connection, deadline + 5)
                if challenge := _challenge(answer):
                    connection.sendall(f"{arrival.proof(challenge, find_token())}\n".encode())
                    answer = _receive(connection, deadline + 5)
            if answer == _GO:
                return
            if answer:
                raise _answered(answer)
            problem = (
                f"it ended without an answer; {TOKEN} or RUN/{TOKEN_FILE} must be equal in all "
                "processes"
            )
        except OSError as error:
            problem = error.strerror or str(error)
        if not has_printed and time.monotonic() > deadline - seconds + 5:
            print(
                f"process {process}: waiting for process 0 at {address} for up to {seconds:.0f} s",
                file=sys.stderr,
            )
            has_printed = True
        time.sleep(min(0.2, max(left, 0)))
    raise TransientError(
        f"process {process}: process 0 could not be reached at distributed.coordinator {address} "
        f"within {seconds:.0f} s ({printable(problem)}); start it too, at an address and port "
        "that this machine can reach"
    )


def _challenge(answer: str) -> str:
    """The challenge in process 0's answer; "" if there is none."""
    try:
        return str(parse_json(answer)["challenge"])
    except (ValueError, KeyError, TypeError, IndexError):
        return ""


def _answered(answer: str) -> UserError:
    """The error in process 0's answer."""
    try:
        code, message = parse_json(answer)
        return error_with(int(code), printable(str(message)))
    except (ValueError, TypeError, OverflowError):  # also of infinity
        return UserError(
            f"distributed.coordinator: another program answers there ({printable(answer)[:100]})"
        )


def _receive(connection: socket.socket, deadline: float) -> str:
    """Returns a line from the other side, truncated if the connection closes.

    Raises:
      OSError: the `deadline` of time.monotonic() has passed.
    """
    line = b""
    while not line.endswith(b"\n") and len(line) < _LONGEST_LINE:
        if (left := deadline - time.monotonic()) <= 0:
            raise TimeoutError("no complete line in time")
        connection.settimeout(left)
        part = connection.recv(_LONGEST_LINE - len(line))
        if not part:
            break
        line += part
    return line.decode("utf-8", "replace").rstrip("\n")
