"""What becomes of a kernel's pod, in a student's words."""

from __future__ import annotations

from typing import Any

import pytest

from gpu_pool.cluster.pod_states import PodFailureCause, PodSurroundings, cause_of, is_refused, read_pod
from gpu_pool_client import EndReason, PodPhase

HERE = PodSurroundings()


def pod(phase: str = "Pending", *, ending: bool = False, **status: Any) -> dict[str, Any]:
    metadata = {"name": "gpu-pool-1-1", "uid": "u1"} | ({"deletionTimestamp": "now"} if ending else {})
    container = {"name": "kernel", "resources": {"limits": {"memory": "4Gi"}}}
    return {"metadata": metadata, "spec": {"containers": [container]}, "status": {"phase": phase, **status}}


def waiting(reason: str, message: str = "") -> dict[str, Any]:
    return {"containerStatuses": [{"state": {"waiting": {"reason": reason, "message": message}}}]}


def ended(code: int, reason: str = "Error", message: str = "") -> dict[str, Any]:
    state = {"terminated": {"exitCode": code, "reason": reason, "message": message}}
    return {"containerStatuses": [{"state": state}]}


def condition(kind: str, status: str, reason: str, message: str = "") -> dict[str, Any]:
    return {"conditions": [{"type": kind, "status": status, "reason": reason, "message": message}]}


RUNNING = {"containerStatuses": [{"state": {"running": {}}}], "podIP": "10.0.0.7"}
NO_CAPACITY = "0/9 nodes are available: 1 Insufficient nvidia.com/gpumem."


@pytest.mark.parametrize(
    ("found", "words"),
    [
        (pod(), "A machine is being chosen for it."),
        (
            pod(**condition("PodScheduled", "False", "Unschedulable", NO_CAPACITY)),
            f"no capacity for it yet: {NO_CAPACITY}",
        ),
        (pod(**condition("PodScheduled", "False", "SchedulingGated")), "A machine is being chosen"),
        (pod(**condition("PodScheduled", "True", "")), "Its software is being fetched"),
        (pod(**waiting("ContainerCreating")), "Its software is being fetched"),
        (
            pod(**waiting("ErrImagePull", "not found")),
            "The course's software cannot be fetched at the moment; it is tried again. "
            "If this goes on, tell the course's instructor.",
        ),
        (pod(**waiting("ImagePullBackOff", "Back-off")), "cannot be fetched at the moment"),
        (
            pod(**waiting("CreateContainerConfigError", 'secret "x" not found')),
            "as it is configured. Tell the",
        ),
        (pod(**waiting("SomethingNew")), "A machine is being chosen for it."),
    ],
)
def test_what_a_kernel_waits_for_is_told(found: dict[str, Any], words: str) -> None:
    state, taken = read_pod(found, HERE)
    assert (state.phase, state.address, taken) == (PodPhase.STARTING, None, None)
    assert words in state.message


CREATING = pod(**condition("PodScheduled", "True", ""), **waiting("ContainerCreating"))
TROUBLES = [
    ("FailedPrepareDynamicResources", "The machine cannot prepare the GPU at the moment; it is tried again."),
    ("FailedMount", "Your home folder cannot be connected at the moment; it is tried again."),
    ("FailedCreatePodSandBox", "The machine cannot prepare a container at the moment; it is tried again."),
]


@pytest.mark.parametrize(("reason", "words"), TROUBLES)
def test_what_an_event_says_is_told_to_students_in_words_and_kept_for_administrators(
    reason: str, words: str
) -> None:
    around = PodSurroundings(event=PodFailureCause(reason, "rpc error: code = 5"))
    state, taken = read_pod(CREATING, around)
    assert (state.phase, taken) == (PodPhase.STARTING, None)
    assert state.message.startswith(words)
    assert "rpc" not in state.message
    assert str(cause_of(CREATING, around)) == f"{reason}: rpc error: code = 5"
    # What the pod says itself is newer.
    pulling = pod(**waiting("ErrImagePull", "not found"))
    assert "cannot be fetched" in read_pod(pulling, around)[0].message
    assert str(cause_of(pulling, around)) == "ErrImagePull: not found"
    # What has started had trouble, and has it no more.
    assert read_pod(pod("Running", **RUNNING), around)[0].message == ""
    assert cause_of(pod("Running", **RUNNING), around) is None


@pytest.mark.parametrize(
    ("found", "event", "words"),
    [
        (
            CREATING,
            PodFailureCause("FailedMount", "x"),
            "Your home folder cannot be connected. Tell the administrator.",
        ),
        (CREATING, None, "Its software is being fetched and its files are being connected."),
        (
            pod(**waiting("ImagePullBackOff", "x")),
            None,
            "software cannot be fetched. Tell the course's instr",
        ),
        (pod(**condition("PodScheduled", "False", "Unschedulable", NO_CAPACITY)), None, NO_CAPACITY),
    ],
)
def test_what_takes_too_long_ends_with_what_it_waited_for(
    found: dict[str, Any], event: PodFailureCause | None, words: str
) -> None:
    state, taken = read_pod(found, PodSurroundings(event=event, waited="10min"))
    assert taken is not None
    assert (state.phase, taken.reason) == (PodPhase.ENDED, EndReason.NOT_READY)
    assert taken.message.startswith("It did not start within 10min. ")
    assert words in taken.message
    for late in (pod("Running", **RUNNING), pod("Failed", **ended(1))):
        assert read_pod(late, PodSurroundings(waited="10min"))[1] is None


@pytest.mark.parametrize("reason", ["UnexpectedAdmissionError", "OutOfnvidia.com/gpu"])
def test_a_machine_that_refuses_a_pod_for_the_moment_ends_nothing_where_it_is_made_again(reason: str) -> None:
    refused = pod("Failed", reason=reason, message="requested number of devices unavailable")
    again = PodSurroundings(is_made_again=True)
    state, taken = read_pod(refused, again)
    assert (state.phase, taken, is_refused(refused)) == (PodPhase.STARTING, None, True)
    assert state.message.startswith("The machine cannot prepare the GPU at the moment")
    assert str(cause_of(refused, again)) == f"{reason}: requested number of devices unavailable"
    assert read_pod(refused, HERE)[1] is not None
    assert read_pod(refused, PodSurroundings(is_made_again=True, waited="10min"))[1] is not None
    assert not is_refused(pod("Failed", reason="Evicted"))
    assert not is_refused(pod("Failed", **ended(1)))


def test_a_kernel_that_runs_has_an_address() -> None:
    state, taken = read_pod(pod("Running", **RUNNING), HERE)
    assert (state.phase, state.address, state.message, taken) == (PodPhase.RUNNING, "10.0.0.7", "", None)


def test_a_machine_that_does_not_answer_for_a_while_ends_nothing() -> None:
    state, taken = read_pod(pod("Running", **RUNNING), PodSurroundings(node_ready=False))
    assert (state.phase, taken) == (PodPhase.RUNNING, None)
    assert "does not answer at the moment" in state.message


@pytest.mark.parametrize(
    ("found", "code", "words"),
    [
        (pod("Failed", **ended(3)), 3, "It ended with status 3."),
        (pod("Succeeded", **ended(0, "Completed")), 0, "It ended with status 0."),
        (pod("Failed", **ended(137, "OOMKilled")), 137, "more than its 4Gi of memory (not of the GPU)"),
        (
            pod("Failed", **ended(128, "StartError", "no such file")),
            128,
            "could not be started: no such file",
        ),
        # Its machine has been lost, or it is cleaned up, after its own end.
        (pod("Failed", ending=True, **ended(1)), None, "It was ended."),
    ],
)
def test_a_kernel_that_ended_by_itself_keeps_its_lease(
    found: dict[str, Any], code: int | None, words: str
) -> None:
    state, taken = read_pod(found, HERE)
    assert (state.phase, state.exit_code, taken) == (PodPhase.ENDED, code, None)
    assert words in state.message


TRACEBACK = """Traceback (most recent call last):
  File "kernelapp.py", line 1, in <module>
\x1b[31mModuleNotFoundError\x1b[0m: No module named 'ipykernel'

"""


#: As ipykernel 7 prints it.
BANNER = r"""
NOTE: When using the `ipython kernel` entry point, Ctrl-C will not work.

To exit, you will have to explicitly quit this process, by either sending
"quit" from a client, or using Ctrl-\ in UNIX-like environments.

To read more about this, see https://github.com/ipython/ipython/issues/2049


To connect another client to this kernel, use:
    --existing connection.json
"""


@pytest.mark.parametrize(
    ("log", "words"),
    [
        ("", "It ended with status 1."),
        (TRACEBACK, "line 1, in <module> ModuleNotFoundError: No module named 'ipykernel'"),
        # What was said last, and not what was said first.
        ("a" * 150 + "\n" + "b" * 150 + "\n", "Its last output: " + "b" * 150),
        ("c" * 900, "Its last output: " + "c" * 197 + "..."),
        # What ipykernel prints at its start is no reason.
        (f"malloc(): corrupted\n{BANNER}", "Its last output: malloc(): corrupted"),
        (BANNER, "It ended with status 1."),
        (
            'Fatal Python error: Aborted\n\nCurrent thread 0x7f (most recent call first):\n  File "a.py", '
            'line 3 in f\n  File "runpy.py", line 88 in _run_code\n\nExtension modules: x (total: 4)\n',
            'Its last output: Fatal Python error: Aborted: File "a.py", line 3 in f',
        ),
    ],
)
def test_a_kernel_that_fails_leaves_its_last_output(log: str, words: str) -> None:
    state, _ = read_pod(pod("Failed", **ended(1, "Error", log)), HERE)
    assert state.message.endswith(words)
    assert "\n" not in state.message


DISRUPTED = [
    ("PreemptionByScheduler", "something more urgent"),
    ("DeletionByTaintManager", "no longer answered, or was closed"),
    ("EvictionByEvictionAPI", "drained for maintenance"),
    ("TerminationByKubelet", "short of memory or disk"),
    ("DeletionByPodGC", "Its machine is gone"),
    ("SomethingNew", "The cluster took it away: so it is"),
]


@pytest.mark.parametrize(
    ("found", "around", "words"),
    [
        (
            pod("Failed", reason="Evicted", message="low on memory"),
            HERE,
            "short of memory or disk: low on memory",
        ),
        (pod("Failed", reason="Evicted", message="m", **ended(137)), HERE, "short of memory or disk"),
        (pod("Failed", reason="NodeLost"), HERE, "no longer answered"),
        (pod("Failed", reason="UnexpectedAdmissionError", message="no gpu"), HERE, "provide the GPU: no gpu"),
        (pod("Failed", reason="OutOfcpu"), HERE, "Its machine refused it (OutOfcpu)"),
        (pod("Running", ending=True, **RUNNING), HERE, "Somebody who manages the cluster deleted it."),
        (
            pod("Running", ending=True, **RUNNING),
            PodSurroundings(notebook_there=False),
            "Your notebook server",
        ),
        (
            pod("Running", ending=True, **RUNNING),
            PodSurroundings(node_ready=False),
            "no longer answered",
        ),
        (pod("Running", ending=True, **RUNNING), PodSurroundings(node_ready=None), "Its machine is gone."),
        (pod("Running", **RUNNING), PodSurroundings(is_gone=True), "Somebody who manages the cluster"),
        *[
            (
                pod("Running", ending=True, **condition("DisruptionTarget", "True", reason, "so it is")),
                HERE,
                words,
            )
            for reason, words in DISRUPTED
        ],
    ],
)
def test_what_the_cluster_took_is_told(found: dict[str, Any], around: PodSurroundings, words: str) -> None:
    state, taken = read_pod(found, around)
    assert (state.phase, state.exit_code) == (PodPhase.ENDED, None)
    assert taken is not None
    assert taken.reason is (EndReason.DEVICE_LOST if around.node_ready is None else EndReason.TAKEN)
    assert words in taken.message == state.message


def test_a_deadline_is_told_as_the_end_of_the_longest_lease() -> None:
    _, taken = read_pod(pod("Failed", reason="DeadlineExceeded", **ended(137)), HERE)
    assert taken is not None
    assert taken.reason is EndReason.TOO_LONG


def test_what_the_pool_ended_itself_was_not_taken() -> None:
    for found in (pod("Running", ending=True, **RUNNING), pod("Running", **RUNNING)):
        state, taken = read_pod(found, PodSurroundings(ended_by_us=True))
        assert (state.phase, state.message, taken) == (PodPhase.ENDED, "It was ended.", None)


def test_the_version_differs_with_everything_that_is_told_and_with_nothing_else() -> None:
    first = read_pod(pod("Running", **RUNNING), HERE)[0].version
    assert read_pod(pod("Running", startTime="later", **RUNNING), HERE)[0].version == first
    another = pod("Running", **RUNNING)
    another["metadata"]["uid"] = "u2"
    versions = {
        first,
        read_pod(another, HERE)[0].version,
        read_pod(pod("Running", **{**RUNNING, "podIP": "10.0.0.8"}), HERE)[0].version,
        read_pod(pod("Running", **RUNNING), PodSurroundings(node_ready=False))[0].version,
        read_pod(pod("Failed", **ended(1)), HERE)[0].version,
    }
    assert len(versions) == 5


def test_the_clusters_words_are_cut() -> None:
    found = pod(**condition("PodScheduled", "False", "Unschedulable", "x" * 5_000))
    assert len(read_pod(found, HERE)[0].message) < 400
