"""A rendezvous of a cluster's processes before JAX's own, which would wait long and abort.

They meet at the coordinator's address. Anyone who reaches the port may connect: a thread per
connection reads one short line, which names the run and the process. Port scanners and processes of
other runs take no place; whoever imitates a process does, as at JAX's coordinator, which listens
there next and trusts everyone. One deadline covers all.
"""

from __future__ import annotations

import contextlib
import ipaddress
import json
import socket
import sys
import threading
import time
from typing import NamedTuple

from data.errors import TransientError, UserError
from data.printable import printable
from data.untrusted_files import parse_json
from trainer.run.outcome import error_with, outcome_of

# How long processes wait for each other: on one machine they start together; several machines may
# have to fetch an image.
LOCAL_SECONDS = 60
SECONDS = 300
REPORT_SECONDS = 15  # between process 0's lines about absent processes
_GO = "go"
_LONGEST_LINE = 4096  # bytes
_LINE_SECONDS = 5.0  # seconds to receive a connection's line
_CONNECTIONS = 4096  # connections served at a time; more are turned away
_PAUSE_SECONDS = 0.1  # pause after a connection that got no file handle or thread
_LOCAL_HOSTS = ("localhost", "127.0.0.1", "::1")


class Words(NamedTuple):
    """What error messages call the address, and advise; by default, for an address in flags."""

    address: str = "distributed.coordinator"
    together: str = "start all of them with the same distributed.coordinator and num_processes"
    other_port: str = "another port would work, the same for all processes"
    own_port: str = "each run needs its own distributed.coordinator"
    reach: str = "start it too, at an address and port that this machine can reach"
    section: str = "distributed."
    """Begins the names of a process's number and their count."""
    error: type[UserError] = UserError
    """The error of a port in use, and of numbers that do not fit together."""


IN_FLAGS = Words()


class _Arrival(NamedTuple):
    """A connection's claims about its process."""

    run: str
    """The name of its run."""

    number: int
    processes: int
    """The number of processes it was started with."""


def meet(
    address: str,
    process: int,
    processes: int,
    seconds: float | None = None,
    run: str = "",
    listen: str | None = None,
    words: Words = IN_FLAGS,
) -> None:
    """Returns once all processes have called this and the coordinator's port is free again.

    Args:
      address: HOST:PORT of process 0.
      listen: JAX_COORDINATOR_BIND_ADDRESS, HOST:PORT where process 0 listens, if elsewhere, as
        behind a load balancer.
      words: for error messages.
      process: number of this process.
      processes: number of all processes.
      seconds: how long to wait; LOCAL_SECONDS or SECONDS by default.
      run: the run's name, equal in all its processes.

    Raises:
      TransientError: a process does not arrive in time, the port is in use, or process 0 is of
        another run, perhaps one that is just being stopped.
      UserError: the address cannot be used, or two processes claim the same number.
    """
    host, port = _split(address, words.address)
    if seconds is None:
        seconds = LOCAL_SECONDS if host in _LOCAL_HOSTS else SECONDS
    deadline = time.monotonic() + seconds
    arrival = _Arrival(run, process, processes)
    if process == 0:
        listens = _split(listen, "JAX_COORDINATOR_BIND_ADDRESS") if listen else (host, port)
        _Gathering(address, listens, arrival, deadline, seconds, words).gather()
    else:
        _report(address, (host, port), arrival, deadline, seconds, words)


def bind_address(address: str) -> str:
    """Returns the HOST:PORT for JAX's coordinator to listen on: the named interface, or all
    interfaces if the name belongs to none of this machine's, as behind a load balancer.
    """
    host, port = _split(address)
    family, ip = _own_interface(host, port) or (socket.AF_INET6, "::")
    return f"[{ip}]:{port}" if family == socket.AF_INET6 else f"{ip}:{port}"


def _split(address: str, name: str = IN_FLAGS.address) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    if not port.isdecimal() or not port.isascii() or not 0 < int(port) < 65536:
        raise UserError(
            f"{name}: found {address}, needs HOST:PORT of process 0 with a port of 1 .. 65535"
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
        own: _Arrival,
        deadline: float,
        seconds: float,
        words: Words,
    ) -> None:
        self.address, self.words = address, words
        self.run = own.run
        self.processes = own.processes
        self.deadline = deadline
        self.seconds = seconds
        self.host, self.port = coordinator
        self.arrived: dict[int, socket.socket] = {}
        self.refused: list[socket.socket] = []
        self.problem: UserError | None = None
        self.warned = False  # of another run's process
        self.changed = threading.Condition()
        self.slots = threading.BoundedSemaphore(_CONNECTIONS)

    def gather(self) -> None:
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
                    f"{self.seconds:.0f} s; {self.words.together}"
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
        everywhere = self.host in ("0.0.0.0", "::")
        try:
            own = None if everywhere else _own_interface(self.host, self.port)
            family, ip = own or (None, "")
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
            raise self.words.error(
                f"process 0: cannot listen at {self.words.address} {self.address} "
                f"({error.strerror}); {self.words.other_port}"
            ) from None

    def _accept(self, server: socket.socket) -> None:
        """The thread that accepts connections until the server is closed."""
        while True:
            try:
                connection, _ = server.accept()
            except OSError:
                if time.monotonic() >= self.deadline:  # `gather` has closed the server
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
        """Reads a connection's line; turns away all but the run's processes."""
        try:
            arrival = _read_arrival(
                connection, min(self.deadline, time.monotonic() + _LINE_SECONDS)
            )
            if arrival is not None and arrival.run != self.run:
                self._turn_away(arrival, connection)
            elif arrival is None or not self._take(arrival, connection):
                connection.close()
        finally:
            self.slots.release()

    def _turn_away(self, arrival: _Arrival, connection: socket.socket) -> None:
        """Tells a process of another run so; prints a warning for the first."""
        mine, other = (" ".join(printable(run).split())[:100] for run in (self.run, arrival.run))
        problem = TransientError(
            f"process 0 at {self.address} trains the run {mine}, and a process of the run {other} "
            f"reached it; {self.words.own_port}, and all its processes the same run_dir"
        )
        with self.changed:
            has_warned, self.warned = self.warned, True
        if not has_warned:
            print(f"warning: {problem}", file=sys.stderr, flush=True)
        _answer([connection], json.dumps(outcome_of(problem)))

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
                self.problem = self.words.error(
                    f"process {number} was started with {self.words.section}num_processes {count}, "
                    f"process 0 with {self.processes}"
                )
            elif number in self.arrived and not _has_left(self.arrived[number]):
                self.problem = self.words.error(
                    f"two processes at {self.address} have {self.words.section}process_id "
                    f"{number}; each needs a unique number"
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


def _read_arrival(connection: socket.socket, deadline: float) -> _Arrival | None:
    """A connection's claim before a deadline; None if it is not the line of a process."""
    try:
        message = parse_json(_receive(connection, deadline))
        arrival = _Arrival(message["run"], message["process"], message["of"])
    except (OSError, ValueError, KeyError, TypeError, IndexError):
        return None
    return arrival if [type(claim) for claim in arrival] == [str, int, int] else None


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
    deadline: float,
    seconds: float,
    words: Words,
) -> None:
    """Every other process reports to process 0, and waits for its answer."""
    process, has_printed, problem = arrival.number, False, "no answer"
    message = json.dumps({"run": arrival.run, "process": process, "of": arrival.processes})
    while (left := deadline - time.monotonic()) > 0:
        try:
            with socket.create_connection(coordinator, timeout=min(left, 5)) as connection:
                connection.sendall(f"{message}\n".encode())
                answer = _receive(connection, deadline + 5)
            if answer == _GO:
                return
            if answer:
                raise _answered(answer, words)
            problem = "it ended without an answer"
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
        f"process {process}: process 0 could not be reached at {words.address} {address} "
        f"within {seconds:.0f} s ({printable(problem)}); {words.reach}"
    )


def _answered(answer: str, words: Words) -> UserError:
    """The error in process 0's answer."""
    try:
        code, message = parse_json(answer)
        return error_with(int(code), printable(str(message)))
    except (ValueError, TypeError, OverflowError):  # also of infinity
        return words.error(
            f"{words.address}: another program, or another version of this one, answers there "
            f"({printable(answer)[:100]}); {words.other_port}"
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
