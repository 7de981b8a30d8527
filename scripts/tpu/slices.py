"""TPU slices of Google Cloud, through either of its two APIs.

`QueuedSlices` uses the Cloud TPU API, which now only gets fixes (queued resources; v2 to v6e).
`GroupSlices` uses Compute Engine (an instance group for each slice, with a workload policy if the
slice has several hosts; v5p, v6e and tpu7x):
https://docs.cloud.google.com/compute/docs/tpus/create-tpu-mig-multi-host-slice
"""

from __future__ import annotations

import abc
import math
import re
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from .gcloud import Gcloud, GcloudError, Kind, Refused, say, sleep, split


@dataclass
class Request:
    """A request to Google Cloud; the fields are the launcher's options."""

    name: str
    slices: int = 1
    type: str = ""
    version: str = ""
    machine_type: str = ""
    topology: str = ""
    spot: bool = False
    flex_start: str = ""
    reservation: str = ""
    options: list[str] = field(default_factory=list)
    """More gcloud options for the creation."""


class State(NamedTuple):
    """The slices' state: READY, WAITING, GONE (preempted or failed) or ABSENT, with details."""

    name: str
    reason: str = ""


class Worker(NamedTuple):
    """A host: the slice's node or instance, and its number in the slice (`all`: every host)."""

    node: str
    number: str


class Slices(abc.ABC):
    """The slices of one run."""

    def __init__(self, gcloud: Gcloud, request: Request, ssh_options: list[str]) -> None:
        self.gcloud, self.request = gcloud, request
        self.ssh_options = ["--strict-host-key-checking", "no", *ssh_options]

    @property
    def nodes(self) -> list[str]:
        """The names of the slices."""
        name = self.request.name
        return (
            [name]
            if self.request.slices == 1
            else [f"{name}-{i}" for i in range(self.request.slices)]
        )

    @abc.abstractmethod
    def check(self) -> None:
        """Raises Refused if the request lacks something needed to create slices."""

    @abc.abstractmethod
    def state(self) -> State:
        """Returns their state. Raises GcloudError."""

    @abc.abstractmethod
    def request_once(self) -> None:
        """Requests them. Raises GcloudError."""

    @abc.abstractmethod
    def delete(self) -> list[str]:
        """Deletes what exists; returns its names once Google Cloud confirms. Raises GcloudError."""

    @abc.abstractmethod
    def workers(self) -> list[Worker]:
        """Returns a Worker for each ssh call needed to reach all hosts, the first host's first."""

    @abc.abstractmethod
    def ssh(self, worker: Worker, command: str) -> list[str]:
        """Returns gcloud's arguments that run a command on a worker."""

    @abc.abstractmethod
    def scp(self, worker: Worker, path: str, name: str) -> list[str]:
        """Returns gcloud's arguments that copy a file into the worker's home."""

    def environment(self, worker: Worker) -> dict[str, str]:
        """Returns the variables that a worker needs besides its image's."""
        return {}

    def _unless_there(self, *words: str) -> None:
        """Creates something, unless an earlier request, whose answer was lost, created it."""
        try:
            self.gcloud(*words)
        except GcloudError as error:
            if not re.search("already exists|ALREADY_EXISTS", error.reason):
                raise

    def create(self, poll: float) -> None:
        """Requests the slices unless they exist, and waits until all are ready.

        Raises:
          Refused: another request would fail too, for example because of the quota.
        """
        self.check()
        pause = poll
        while (state := self.state()).name != "READY":
            if state.name == "WAITING":
                say(
                    f"{self.request.name} is being created{': ' * bool(state.reason)}{state.reason}"
                )
                sleep(poll)
                continue
            if state.name == "GONE":
                say(f"{self.request.name} is lost: {state.reason}")
                if re.search("[Qq]uota", state.reason):
                    raise Refused(f"the quota does not allow {self.request.name}: {state.reason}")
                self.delete()
                say(f"requesting another one in {pause:.0f} s")
                sleep(pause)
                pause = min(600, 2 * max(pause, 1))
            try:
                say(f"requesting {self.request.name}")
                self.request_once()
            except GcloudError as error:
                if error.kind not in (Kind.CAPACITY, Kind.NETWORK):
                    raise Refused(f"{self.request.name} cannot be requested: {error}") from None
                say(f"{error}; asking again in {pause:.0f} s")
                sleep(pause)
                pause = min(600, 2 * max(pause, 1))


def _check_one_way(request: Request) -> None:
    """Raises Refused if two ways to buy capacity are given."""
    chosen = [name for name in ("spot", "flex_start", "reservation") if getattr(request, name)]
    if len(chosen) > 1:
        raise Refused(f"--{' and --'.join(chosen)} exclude each other".replace("_", "-"))


class QueuedSlices(Slices):
    """Slices of a queued resource of the Cloud TPU API."""

    def _tpus(self, *words: str) -> Any:
        return self.gcloud.describe("compute", "tpus", *words, *self.gcloud.where)

    def check(self) -> None:
        """Raises Refused if type or version is missing."""
        if not (self.request.type and self.request.version):
            raise Refused(
                "--type and --version are missing, such as --type v5p-128 --version "
                "v2-alpha-tpuv5; or, for Compute Engine, --machine-type and --topology"
            )
        if self.request.type.startswith("tpu7x"):
            raise Refused(
                "the Cloud TPU API has no tpu7x: --machine-type tpu7x-standard-4t --topology 4x4x4 "
                "requests it from Compute Engine"
            )
        if self.request.topology:
            raise Refused(
                "--topology only applies to Compute Engine; with the Cloud TPU API, --type gives "
                "the size of a slice"
            )
        if self.request.flex_start:
            raise Refused(
                "--flex-start only applies to Compute Engine: pass --machine-type and --topology"
            )
        if self.request.reservation:
            raise Refused(
                "--reservation only applies to Compute Engine; with the Cloud TPU API, "
                "--create-options=--reserved uses the project's reservation"
            )

    def state(self) -> State:
        """As Slices; a preempted node counts even if its queued resource is still ACTIVE."""
        queued = self._tpus("queued-resources", "describe", self.request.name)
        if queued is None:
            return self._nodes_state("ABSENT")
        state = queued.get("state", {})
        name = state.get("state", "UNKNOWN")
        if name in ("FAILED", "SUSPENDED", "SUSPENDING", "DELETING"):
            error = state.get("failedData", {}).get("error", {}).get("message", "")
            return State("GONE", f"{name}{': ' * bool(error)}{error}")
        return self._nodes_state("GONE") if name == "ACTIVE" else State("WAITING", name)

    def _nodes_state(self, absent: str) -> State:
        """Returns the state of the nodes; `absent` if one of them is missing."""
        for node in self.nodes:
            described = self._tpus("tpu-vm", "describe", node)
            if described is None:
                return State(absent, f"the TPU VM {node} does not exist")
            if described.get("state") in ("CREATING", "STARTING", "RESTARTING", "REPAIRING"):
                return State("WAITING", f"{node} is {described['state']}")
            if described.get("state") != "READY":
                return State("GONE", f"{node} is {described.get('state')}")
        return State("READY")

    def request_once(self) -> None:
        """As Slices."""
        request = self.request
        nodes = (
            ["--node-id", request.name]
            if request.slices == 1
            else ["--node-count", str(request.slices), "--node-prefix", request.name]
        )
        self._unless_there(
            *split("compute tpus queued-resources create"),
            request.name,
            *nodes,
            "--accelerator-type",
            request.type,
            "--runtime-version",
            request.version,
            *["--spot"] * request.spot,
            *request.options,
            *self.gcloud.where,
        )

    def delete(self) -> list[str]:
        """As Slices; also a TPU VM that was created without a queued resource."""
        deleted = []
        if self._tpus("queued-resources", "describe", self.request.name) is not None:
            # --force also deletes its TPU VMs.
            self.gcloud(
                *split("compute tpus queued-resources delete"),
                self.request.name,
                "--force",
                *self.gcloud.where,
            )
            deleted.append(f"queued resource {self.request.name}")
        for node in self.nodes:
            if self._tpus("tpu-vm", "describe", node) is not None:
                self.gcloud("compute", "tpus", "tpu-vm", "delete", node, *self.gcloud.where)
                deleted.append(f"TPU VM {node}")
        left = [node for node in self.nodes if self._tpus("tpu-vm", "describe", node) is not None]
        if left:
            raise Refused(f"{', '.join(left)} still exists and is billed: delete it in the console")
        return deleted

    def workers(self) -> list[Worker]:
        """As Slices: gcloud reaches all hosts of a node."""
        return [Worker(node, "all") for node in self.nodes]

    def ssh(self, worker: Worker, command: str) -> list[str]:
        """As Slices."""
        return [
            *split("compute tpus tpu-vm ssh"),
            worker.node,
            *self.gcloud.where,
            f"--worker={worker.number}",
            *self.ssh_options,
            "--command",
            command,
        ]

    def scp(self, worker: Worker, path: str, name: str) -> list[str]:
        """As Slices."""
        return [
            *split("compute tpus tpu-vm scp"),
            path,
            f"{worker.node}:{name}",
            *self.gcloud.where,
            f"--worker={worker.number}",
            *self.ssh_options,
        ]


# Families of images with the TPU's driver:
# https://docs.cloud.google.com/compute/docs/tpus/create-tpu-vm-instance
_IMAGES = {
    "ct5p-": "ubuntu-accel-2204-amd64-tpu-v5e-v5p-v6e",
    "ct6e-": "ubuntu-accel-2204-amd64-tpu-v5e-v5p-v6e",
    "tpu7x-": "ubuntu-accel-2404-amd64-tpu-tpu7x",
}


class GroupSlices(Slices):
    """Slices of Compute Engine: one managed instance group each."""

    def check(self) -> None:
        """Raises Refused if machine type or topology is missing or unknown."""
        request = self.request
        if not request.machine_type:
            raise Refused(
                "--machine-type is missing, such as --machine-type ct6e-standard-4t --topology 4x4"
            )
        if not request.machine_type.startswith(tuple(_IMAGES)) or not re.search(
            r"-\d+t$", request.machine_type
        ):
            raise Refused(
                f"--machine-type: found {request.machine_type}; expected one of Compute Engine's "
                "TPUs, such as ct5p-hightpu-4t, ct6e-standard-4t, tpu7x-standard-4t"
            )
        if request.version:
            raise Refused(
                "--version only applies to the Cloud TPU API; with Compute Engine, the machine "
                "type determines the image"
            )
        if request.topology and not re.fullmatch(r"\d+x\d+(x\d+)?", request.topology):
            raise Refused(
                f"--topology: found {request.topology}; expected the chips along each side, such "
                "as 4x4 or 4x4x4"
            )
        if self._chips % self._chips_per_host:
            raise Refused(
                f"--topology: {request.topology} has {self._chips} chips, which is not a multiple "
                f"of the {self._chips_per_host} on each host"
            )
        _check_one_way(request)

    @property
    def _chips_per_host(self) -> int:
        return int(self.request.machine_type.rpartition("-")[2].removesuffix("t"))

    @property
    def _chips(self) -> int:
        sides = (
            self.request.topology.split("x")
            if self.request.topology
            else [str(self._chips_per_host)]
        )
        return math.prod(map(int, sides))

    @property
    def _hosts(self) -> int:
        return self._chips // self._chips_per_host

    def _bought(self) -> list[str]:
        if self.request.spot:
            return ["--provisioning-model", "SPOT", "--instance-termination-action", "STOP"]
        if self.request.flex_start:
            return [
                *split("--provisioning-model FLEX_START --max-run-duration"),
                self.request.flex_start,
                "--instance-termination-action",
                "DELETE",
            ]
        if self.request.reservation:
            return [
                *split("--provisioning-model RESERVATION_BOUND"),
                *split("--reservation-affinity specific --reservation"),
                self.request.reservation,
            ]
        return []

    def _groups(self, *words: str) -> Any:
        return self.gcloud.describe(
            "compute", "instance-groups", "managed", *words, *self.gcloud.where
        )

    def _instances(self, node: str) -> list[dict[str, Any]] | None:
        """Returns a slice's instances; None without the group."""
        if self._groups("describe", node) is None:
            return None
        return sorted(self._groups("list-instances", node) or [], key=lambda item: item["instance"])

    def state(self) -> State:
        """As Slices."""
        waiting, present = "", 0
        for node in self.nodes:
            if (instances := self._instances(node)) is None:
                continue
            present += 1
            for item in instances:
                errors = [
                    error.get("message", "")
                    for error in item.get("lastAttempt", {}).get("errors", {}).get("errors", [])
                ]
                name, status = item["instance"].rpartition("/")[2], item.get("instanceStatus", "")
                if status in ("STOPPING", "STOPPED", "SUSPENDED", "TERMINATED"):
                    return State("GONE", f"{name} is {status}")
                if errors and re.search("[Qq]uota", " ".join(errors)):
                    return State("GONE", "; ".join(errors))
                if status != "RUNNING":
                    state = status or item.get("currentAction")
                    waiting = f"{name} is {state}{': ' * bool(errors)}{'; '.join(errors)}"
            if not instances:
                waiting = f"{node} has no instance yet"
        if not present:
            return State("ABSENT")
        if present < len(self.nodes):
            return State("GONE", f"only {present} of {len(self.nodes)} groups exist")
        return State("WAITING", waiting) if waiting else State("READY")

    def request_once(self) -> None:
        """As Slices: a workload policy for multi-host slices, a template, a group per slice."""
        name, policy = self.request.name, []
        if self._hosts > 1:
            self._unless_there(
                *split("compute resource-policies create workload-policy"),
                name,
                *split("--type HIGH_THROUGHPUT --accelerator-topology"),
                self.request.topology,
                "--region",
                self.gcloud.region,
                *self.gcloud.project,
            )
            policy = ["--workload-policy", name]
        family = next(
            image
            for prefix, image in _IMAGES.items()
            if self.request.machine_type.startswith(prefix)
        )
        self._unless_there(
            *split("compute instance-templates create"),
            name,
            "--machine-type",
            self.request.machine_type,
            *split("--maintenance-policy TERMINATE --image-family"),
            family,
            *split("--image-project ubuntu-os-accelerator-images"),
            *split("--boot-disk-size 200GB --scopes cloud-platform"),
            *self._bought(),
            *self.request.options,
            *self.gcloud.project,
        )
        for node in self.nodes:
            # All hosts at once or none; a lost one is not replaced alone, since the slice's links
            # are lost too.
            self._unless_there(
                *split("compute instance-groups managed create"),
                node,
                "--template",
                name,
                "--size",
                str(self._hosts),
                *policy,
                *split("--target-size-policy-mode bulk --default-action-on-vm-failure do-nothing"),
                *self.gcloud.where,
            )

    def delete(self) -> list[str]:
        """As Slices: the groups with their instances, the template and the policy."""
        deleted = []
        for node in self.nodes:
            if self._groups("describe", node) is not None:
                self.gcloud(
                    "compute", "instance-groups", "managed", "delete", node, *self.gcloud.where
                )
                deleted.append(f"instance group {node}")
        for kind, words in (
            ("template", ["instance-templates", "delete", self.request.name]),
            (
                "policy",
                ["resource-policies", "delete", self.request.name, "--region", self.gcloud.region],
            ),
        ):
            try:
                self.gcloud("compute", *words, *self.gcloud.project)
                deleted.append(f"{kind} {self.request.name}")
            except GcloudError as error:
                if error.kind is not Kind.ABSENT:
                    raise
        return deleted

    def workers(self) -> list[Worker]:
        """As Slices: each instance."""
        return [
            Worker(instance["instance"].rpartition("/")[2], str(number))
            for node in self.nodes
            for number, instance in enumerate(self._instances(node) or [])
        ]

    def ssh(self, worker: Worker, command: str) -> list[str]:
        """As Slices."""
        return [
            "compute",
            "ssh",
            worker.node,
            *self.gcloud.where,
            *self.ssh_options,
            "--command",
            command,
        ]

    def scp(self, worker: Worker, path: str, name: str) -> list[str]:
        """As Slices."""
        return [
            "compute",
            "scp",
            path,
            f"{worker.node}:{name}",
            *self.gcloud.where,
            *self.ssh_options,
        ]

    def environment(self, worker: Worker) -> dict[str, str]:
        """As Slices: a host's slice among several, for libtpu."""
        if self.request.slices == 1:
            return {}
        number = next(i for i, node in enumerate(self.nodes) if worker.node.startswith(f"{node}-"))
        first = self.workers()[0].node
        return {
            "MEGASCALE_COORDINATOR_ADDRESS": first,
            "MEGASCALE_NUM_SLICES": str(self.request.slices),
            "MEGASCALE_SLICE_ID": str(number),
        }
