"""What can be configured of servers on Kubernetes, as ``c.GPUPoolKubeSpawner``."""

from __future__ import annotations

import re
from typing import Any, Final

from traitlets import Bool, Dict, TraitError, Unicode, validate

from gpu_pool.cluster.dialects import AUTO, DialectOptions, dialect_names
from gpu_pool_client import BadRequest
from gpu_pool_client._traits import Seconds
from gpu_pool_spawner.mixin import GPUPoolSpawnerMixin

#: A namespace's name has 63 characters at most, and a course's 50.
_NAMESPACE: Final = re.compile(r"(?:[a-z0-9][a-z0-9-]{0,12})?\{course\}", re.ASCII)


class KubeSettings(GPUPoolSpawnerMixin):
    """A spawner for courses that has the settings of a cluster, and asks none."""

    dialect = Unicode(
        AUTO,
        help=f"How the cluster shares GPUs: {AUTO} (detected), or the name of a dialect: aliyun, "
        "bitfusion, device-plugin, dra, gke, hami, kai, koordinator, volcano, or another package's.",
    ).tag(config=True)
    dialect_options = Dict(
        help="What the nodes do not show, such as {'queue': 'students'} for KAI and Volcano.",
    ).tag(config=True)
    refuse_when_full = Bool(
        True,
        help="""Whether a server with a slice is refused at once if no GPU has enough free. Set it to False
        if the cluster adds nodes when pods wait.""",
    ).tag(config=True)
    place_within = Seconds(
        60,
        help="""Seconds within which a pod must have a node; otherwise its start is given up. 0 means as
        long as start_timeout, for clusters that add nodes when pods wait.""",
    ).tag(config=True)

    courses_as_profiles = Bool(
        False,
        help="""Whether the courses of a user are profiles in KubeSpawner's own form, after those of
        profile_list. That form is shown, too, where profile_list alone is set.""",
    ).tag(config=True)
    course_namespace = Unicode(
        help="""The namespace of a course's servers and home directories, such as course-{course}; by
        default all are in c.KubeSpawner.namespace. They must exist, and the Hub needs its rights in each.""",
    ).tag(config=True)
    kueue = Bool(
        False,
        help="Whether servers wait in Kueue's queues of their courses, which gpu-pool courses export writes.",
    ).tag(config=True)

    @validate("dialect")
    def _check_dialect(self, proposal: Any) -> str:
        if proposal.value not in (accepted := (AUTO, *dialect_names())):
            raise TraitError(f"dialect is {proposal.value!r}. Accepted: {', '.join(accepted)}.")
        return str(proposal.value)

    @validate("course_namespace")
    def _check_namespace(self, proposal: Any) -> str:
        if proposal.value and not _NAMESPACE.fullmatch(proposal.value):
            raise TraitError(f"course_namespace is {proposal.value!r}. Accepted: course-{{course}}, say.")
        return str(proposal.value)

    @validate("dialect_options")
    def _check_options(self, proposal: Any) -> dict[str, Any]:
        try:
            DialectOptions(**proposal.value)
        except (TypeError, BadRequest) as error:
            raise TraitError(f"dialect_options: {error}") from None
        return dict(proposal.value)
