"""What somebody may choose of a server on Kubernetes: a course and, where the server has it, a slice. Pure.

As ``user_options`` it is ``{"course": "ml", "slice": "Small"}``, the slice being
one of the course's names or a request that the course allows. The form has one
field for both, ``course``, with ``ml/Small``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from gpu_pool.courses import CourseFile, check_offered
from gpu_pool_client import BadRequest, SliceRequest, parse_request
from gpu_pool_spawner import choices

#: Which of its course's slices a server gets, in ``user_options`` and in links.
SLICE: Final = "slice"


def options_of_form(form: Mapping[str, Sequence[object]]) -> dict[str, str]:
    """Return the ``user_options`` that a filled-in form means. Raises ``BadRequest`` for anything else."""
    return _split(choices.options_of_form(form))


def options_of_link(query: Mapping[str, Sequence[object]]) -> dict[str, str]:
    """Return those of a link such as ``/hub/spawn?course=ml&slice=2%25``.

    Raises ``BadRequest`` where it chooses nothing: the form is shown then.
    """
    rest = {name: values for name, values in query.items() if name != SLICE}
    options = _split(choices.options_of_link(rest))
    given = list(query.get(SLICE, ()))
    if len(given) > 1:
        raise BadRequest("Several slices were chosen.", "Choose one.")
    if given:
        options[SLICE] = str(given[0])
    return options


def chosen(options: Mapping[str, object]) -> tuple[str | None, str | None]:
    """Return the names of the course and of the slice in ``user_options``. Raises ``BadRequest``."""
    name = choices.chosen({key: value for key, value in options.items() if key != SLICE})
    piece = options.get(SLICE)
    if piece is not None and not isinstance(piece, str):
        raise BadRequest("The slice that was chosen is not a name.", f'Accepted: {{"{SLICE}": "NAME"}}.')
    return name, piece or None


def request_of(course: CourseFile, piece: str | None) -> SliceRequest | None:
    """Return the slice that a server of this course gets; None where its kernels have theirs.

    Raises ``BadRequest`` or ``NotAllowed`` for what the course does not offer.
    """
    if course.kubernetes.kernels == "pods":
        if piece is not None:
            raise BadRequest(
                f"A server of {course.title} has no slice: each of its kernels gets one.",
                "Leave the slice out, and choose it when you start a kernel.",
            )
        return None
    if piece is None:
        return course.default_slice.request
    named = next((offer.request for offer in course.slices if offer.name == piece), None)
    request = named or parse_request(piece)
    check_offered(course, request)
    return request


def _split(options: Mapping[str, str]) -> dict[str, str]:
    name, slash, piece = options.get(choices.COURSE, "").partition("/")
    found = {choices.COURSE: name, SLICE: piece if slash else ""}
    return {key: value for key, value in found.items() if value}
