"""How a refusal by the service's own admission policy is read. The policy is tested on an API server."""

from __future__ import annotations

import pytest

from gpu_pool.cluster.dialects.pod_troubles import Denial, denial
from support.kube_examples import EXAMPLES

#: As an API server of Kubernetes 1.36 answers.
REFUSED = (
    "pods \"gpu-pool-7-0123abcd-1\" is forbidden: ValidatingAdmissionPolicy 'gpu-pool-pods-hub' with binding "
    "'gpu-pool-pods-hub' denied request: {}"
)


def test_what_the_policy_found_is_read_from_its_words() -> None:
    said = REFUSED.format("The pod is not as jupyter-gpu-pool makes it: it has the volumes\nvgpu, more")
    assert denial(said) == Denial("gpu-pool-pods-hub", "pod", "it has the volumes vgpu, more")


@pytest.mark.parametrize(
    "said",
    [
        REFUSED.format("images come from our registry alone"),
        "exceeded quota: pods",
        "The pod is not as jupyter-gpu-pool makes it: somebody else says so",
    ],
)
def test_other_refusals_are_not_taken_for_it(said: str) -> None:
    assert denial(said) is None


def test_every_rule_of_the_policies_says_the_words_by_which_it_is_known() -> None:
    text = (EXAMPLES / "service" / "admissionpolicy.yaml").read_text()
    told = [line for line in text.splitlines() if line.strip().startswith(("message:", "messageExpression:"))]
    assert len(told) == text.count("reason: Forbidden") > 5
    assert all(denial(REFUSED.format(line.split('"', 1)[1])) for line in told)
