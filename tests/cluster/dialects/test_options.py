"""What an administrator says of a cluster, as it comes from files."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest
import yaml

from gpu_pool.cluster.dialects import DialectOptions
from gpu_pool.cluster.dialects.base import _ACCEPTED
from gpu_pool_client import BadRequest


def test_options_of_yaml_are_those_of_python() -> None:
    text = """\
    {bitfusion_client: [centos8, "401"], queue: students, runtime_class: null, memory_limiter: true,
     volcano_memory_factor: 10, aliyun_memory_unit: 1, policy: spread, context_mib: 400, most_milli: 2000}
    """
    read = DialectOptions(**yaml.safe_load(text))
    assert read.bitfusion_client == ("centos8", "401")
    same = DialectOptions(
        queue="students",
        memory_limiter=True,
        volcano_memory_factor=10,
        aliyun_memory_unit=1,
        bitfusion_client=("centos8", "401"),
        policy="spread",
        context_mib=400,
        most_milli=2000,
    )
    assert {read: "kept"}[same] == "kept", "what is kept by its options is found again"


@pytest.mark.parametrize(
    ("text", "given", "accepted"),
    [
        ("context_mib: '350'", "context_mib is '350'.", "a whole number, such as 350, without quotes"),
        ("most_milli: 1.5", "most_milli is 1.5.", "a whole number"),
        ("most_milli: true", "most_milli is True.", "a whole number"),
        ("volcano_memory_factor: '10'", "volcano_memory_factor is '10'.", "a whole number"),
        ("aliyun_memory_unit: null", "aliyun_memory_unit is None.", "a whole number"),
        ("memory_limiter: 'no'", "memory_limiter is 'no'.", "true or false"),
        ("queue: [students]", "queue is ['students'].", "text, or none"),
        ("runtime_class: 1", "runtime_class is 1.", "text, or none"),
        ("policy: {a: 1}", "policy is {'a': 1}.", "text, or none"),
        ("container: null", "container is None.", "text."),
        ("bitfusion_client: [ubuntu20, 450]", "bitfusion_client is ('ubuntu20', 450).", "two texts"),
        ("bitfusion_client: [ubuntu20]", "bitfusion_client is ('ubuntu20',).", "two texts"),
        ("bitfusion_client: ab", "bitfusion_client is 'ab'.", "two texts"),
    ],
)
def test_an_option_of_another_kind_is_refused_with_what_is_accepted(
    text: str, given: str, accepted: str
) -> None:
    options: dict[str, Any] = yaml.safe_load(text)
    with pytest.raises(BadRequest) as error:
        DialectOptions(**options)
    assert given in str(error.value)
    assert f"Accepted: {accepted}" in str(error.value)


def test_every_option_is_checked() -> None:
    assert [each.name for each in fields(DialectOptions)] == list(_ACCEPTED)
