"""What keeps a pod from starting, told apart by Kubernetes' own words for it. Pure.

Kubernetes speaks to administrators. What is returned here is for students, who
read none of its text, or says to an administrator what is to be done.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class Trouble:
    """Something that keeps a pod from starting, in words for whoever waits for it."""

    what: str
    #: Who can mend it.
    whom: str
    #: Whether Kubernetes tries again and that can help.
    may_pass: bool = True

    @property
    def waiting(self) -> str:
        """What is read while it may still start."""
        if not self.may_pass:
            return self.final
        return f"{self.what} at the moment; it is tried again. If this goes on, tell {self.whom}."

    @property
    def final(self) -> str:
        """What is read when nobody waits any more."""
        return f"{self.what}. Tell {self.whom}."


_INSTRUCTOR: Final = "the course's instructor"
_ADMINISTRATOR: Final = "the administrator"
NOT_FETCHED: Final = Trouble("The course's software cannot be fetched", _INSTRUCTOR)
NO_NAME: Final = Trouble("The name of the course's software is not valid", _INSTRUCTOR, may_pass=False)
NOT_THERE: Final = Trouble("The course's software is not on its machine", _INSTRUCTOR, may_pass=False)
NOT_AS_DESCRIBED: Final = Trouble(
    "The course's software cannot be started as it is configured", _INSTRUCTOR, may_pass=False
)
NO_FILES: Final = Trouble("Your home folder cannot be connected", _ADMINISTRATOR)
NO_GPU: Final = Trouble("The machine cannot prepare the GPU", _ADMINISTRATOR)
NO_CAPACITY: Final = Trouble("The machine has no free capacity", _ADMINISTRATOR)
NO_CONTAINER: Final = Trouble("The machine cannot prepare a container", _ADMINISTRATOR)

#: By the reason of an event, or of a container that waits.
_BY_REASON: Final[Mapping[str, Trouble]] = {
    "ErrImagePull": NOT_FETCHED,
    "ImagePullBackOff": NOT_FETCHED,
    "RegistryUnavailable": NOT_FETCHED,
    "SignatureValidationFailed": NOT_FETCHED,
    "ImageInspectError": NOT_FETCHED,
    "InvalidImageName": NO_NAME,
    "ErrImageNeverPull": NOT_THERE,
    "FailedMount": NO_FILES,
    "FailedAttachVolume": NO_FILES,
    "FailedMapVolume": NO_FILES,
    "FailedPrepareDynamicResources": NO_GPU,
    "UnexpectedAdmissionError": NO_GPU,
    "FailedCreatePodSandBox": NO_CONTAINER,
    "FailedPodSandBoxStatus": NO_CONTAINER,
    "NetworkNotReady": NO_CONTAINER,
    "FailedCreatePodContainer": NO_CONTAINER,
    "CreateContainerConfigError": NOT_AS_DESCRIBED,
    "CreateContainerError": NOT_AS_DESCRIBED,
    "RunContainerError": NOT_AS_DESCRIBED,
}
#: Reasons that a kubelet gives for this and that; of an image where they say so.
_OF_ANYTHING: Final = ("Failed", "BackOff")
_IMAGE: Final = re.compile(r"image|pull", re.IGNORECASE)
#: A kubelet's reason for a pod that asks for more of something than it has: OutOfcpu, OutOfnvidia.com/gpu.
_OUT_OF: Final = "OutOf"

_VIOLATION: Final = re.compile(r'violates PodSecurity "(?P<level>[a-z]+):[^"]*": (?P<rules>.*)', re.DOTALL)
#: What keeps a rule of Pod Security, by what it says of who does not.
_KEPT_BY: Final[Mapping[str, tuple[str, str]]] = {
    "allowPrivilegeEscalation": ("container", "allowPrivilegeEscalation: false"),
    "unrestricted capabilities": ("container", "capabilities: {drop: [ALL]}"),
    "runAsNonRoot": ("pod", "runAsNonRoot: true"),
    "seccompProfile": ("pod", "seccompProfile: {type: RuntimeDefault}"),
}
#: How a policy of admission refuses, in the API server's words.
_DENIAL: Final = re.compile(
    r"ValidatingAdmissionPolicy '(?P<policy>[^']*)' with binding '[^']*' denied request: (?P<why>.*)",
    re.DOTALL,
)
#: By which those of ours are known: examples/kubernetes/service/admissionpolicy.yaml, and the chart's.
_NOT_OURS: Final = re.compile(
    r"The (?P<kind>pod|Secret|ConfigMap) is not as jupyter-gpu-pool makes it: (?P<why>.*)", re.DOTALL
)


@dataclass(frozen=True, slots=True)
class Violation:
    """What Pod Security refused a pod for."""

    #: ``baseline`` or ``restricted``.
    level: str
    #: In Kubernetes' words.
    rules: str

    def settings(self) -> Mapping[str, str]:
        """Return what would keep those of the rules that a security context keeps, of pod and container."""
        kept = [by for rule, by in _KEPT_BY.items() if rule in self.rules]
        found = {place: ", ".join(text for where, text in kept if where == place) for place, _ in kept}
        return {place: f"{{{text}}}" for place, text in sorted(found.items())}


def trouble_of(reason: str, message: str) -> Trouble | None:
    """Return the trouble that an event, or a container that waits, tells of; None if none is known."""
    if reason in _OF_ANYTHING and _IMAGE.search(message):
        return NOT_FETCHED
    if reason.startswith(_OUT_OF):
        return NO_GPU if "/" in reason else NO_CAPACITY
    return _BY_REASON.get(reason)


def violation(message: str) -> Violation | None:
    """Read from the API server's refusal of a pod what Pod Security has against it, if it is that."""
    found = _VIOLATION.search(message)
    return found and Violation(found["level"], " ".join(found["rules"].split()))


@dataclass(frozen=True, slots=True)
class Denial:
    """What the policy that keeps the service to its own pods and Secrets refused one for."""

    policy: str
    #: ``pod`` or ``Secret``.
    kind: str
    #: In the policy's words.
    why: str


def denial(message: str) -> Denial | None:
    """Read from the API server's refusal what the pool's own policy has against it, if it is that."""
    found = _DENIAL.search(message)
    ours = found and _NOT_OURS.match(found["why"])
    return Denial(found["policy"], ours["kind"], " ".join(ours["why"].split())) if found and ours else None
