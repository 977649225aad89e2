"""What pages send."""

from __future__ import annotations

from typing import Annotated, Final, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from gpu_pool_client import BadRequest

#: Longer than any size that there is, and than any time for which a kernel is kept.
_LONGEST_SIZE: Final = 200
_LONGEST_KEEP: Final = 366 * 86_400
#: Mistakes of one body that are named.
_MOST_NAMED: Final = 3


B = TypeVar("B", bound="EmptyBody")


class EmptyBody(BaseModel):
    """What is sent where nothing needs to be said."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class KeepBody(EmptyBody):
    """For how long a kernel counts as in use, in seconds."""

    seconds: Annotated[int, Field(ge=1, le=_LONGEST_KEEP)]


class SizeBody(EmptyBody):
    """Another size, and whether it is to change only when the kernel is restarted."""

    size: Annotated[str, Field(min_length=1, max_length=_LONGEST_SIZE)]
    at_restart: bool = False


def read(kind: type[B], text: bytes) -> B:
    """Read a body. Raises ``BadRequest`` that says what was given and what is accepted."""
    try:
        return kind.model_validate_json(text or b"{}")
    except ValidationError as error:
        wrong = error.errors(include_url=False, include_context=False)[:_MOST_NAMED]
        said = "; ".join(
            f"{'.'.join(map(str, each['loc'])) or 'the body'}: {each['msg']}, and not {each['input']!r:.60}"
            for each in wrong
        )
        raise BadRequest(f"What was sent is not accepted: {said}.", _accepted(kind)) from error


def _accepted(kind: type[EmptyBody]) -> str:
    examples = {KeepBody: '{"seconds": 3600}', SizeBody: '{"size": "10%", "at_restart": false}'}
    return f"Send JSON like {examples.get(kind, '{}')}."
