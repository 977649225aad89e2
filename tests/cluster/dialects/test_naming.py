"""Hostile names never reach labels as they are, and nobody takes another's."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpu_pool.cluster.dialects import content_name, identity_labels, label_value

VALID = re.compile(r"[A-Za-z0-9]([A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?")


@pytest.mark.parametrize("text", ["ada", "Ada.Lovelace", "physik-101", "a", "x" * 63])
def test_a_valid_name_stays_as_it_is(text: str) -> None:
    assert label_value(text) == text


@pytest.mark.parametrize(
    ("text", "readable"),
    [
        ("ada@uni.example", "ada-uni.example"),
        ("Zoë", "Zo"),
        ("", "x"),
        ("-ada-", "ada"),
        ("a\nb: c", "a-b-c"),
        ("x" * 64, "x" * 44),
        ("\ud800", "x"),
        ("ada---0123456789abcdef", "ada-0123456789abcdef"),
    ],
)
def test_every_other_name_is_made_readable_and_its_own(text: str, readable: str) -> None:
    value = label_value(text)
    assert value != text
    assert value.rpartition("---")[0] == readable
    assert VALID.fullmatch(value)


@given(st.text())
def test_every_name_becomes_a_valid_value(text: str) -> None:
    assert VALID.fullmatch(label_value(text))


@given(st.text(max_size=80), st.text(max_size=80))
def test_two_names_never_become_one(one: str, other: str) -> None:
    assert (label_value(one) == label_value(other)) == (one == other)


@given(st.text())
def test_the_value_of_one_name_cannot_be_taken_by_spelling_it(text: str) -> None:
    assert label_value(label_value(text)) != label_value(text) or label_value(text) == text


def test_a_pod_says_whose_it_is() -> None:
    assert identity_labels("ada", "physics 1") == {
        "app.kubernetes.io/managed-by": "jupyter-gpu-pool",
        "jupyter-gpu-pool/user": "ada",
        "jupyter-gpu-pool/course": label_value("physics 1"),
    }


def test_content_of_another_order_is_the_same_content() -> None:
    assert content_name({"a": 1, "b": 2}) == content_name({"b": 2, "a": 1}) != content_name({"a": 2, "b": 1})
