"""How the arguments and the answer of an operation travel, made from its row and the types of its method.

An argument goes into the path, the query or the body under its own name. A request for a slice travels as
its text; a holder and a kernel's command by their fields. Nobody can say who they are: that is in no form.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Final, get_args, get_origin, get_type_hints
from urllib.parse import quote, urlencode

from pydantic import BeforeValidator, Field, PlainSerializer, TypeAdapter, WithJsonSchema, create_model

from gpu_pool_client._leases import EndReason, Holder, Lease, PoolStatus
from gpu_pool_client._operations import Http, Operation
from gpu_pool_client._pods import KernelCommand
from gpu_pool_client._remote import bodies
from gpu_pool_client._requests import SliceRequest, parse_request

#: Longest id that is sent: longer than any that there is.
_LONGEST_ID: Final = 128
_REQUIRED: Final = dataclasses.MISSING


def _read_request(value: Any) -> Any:
    return parse_request(value) if isinstance(value, str) else value


#: A request for a slice, as its text.
WireRequest = Annotated[
    SliceRequest,
    BeforeValidator(_read_request),
    PlainSerializer(str, return_type=str),
    WithJsonSchema({"type": "string"}),
]
#: Numbers: of a body that has none where one should be, such as true, that is said.
_Number = Annotated[float, Field(strict=True)]
#: What travels in place of these types.
_WIRE: Final[Mapping[Any, Any]] = {
    SliceRequest: WireRequest,
    float: _Number,
    float | None: _Number | None,
    Lease: bodies.WireLease,
    PoolStatus: bodies.StatusBody,
    tuple[SliceRequest, ...] | None: tuple[WireRequest, ...] | None,
    Mapping[str, int]: dict[str, int],
    # Of a kernel's command.
    Mapping[str, Any]: dict[str, str | int],
    Mapping[str, str]: dict[str, str],
    type(None): dict[str, str],
}
#: What may be said of a holder, see ``Http.holder``.
_OF_HOLDER: Final[Mapping[str, tuple[Any, Any]]] = {
    "course": (str | None, None),
    "kernel": (str | None, None),
    "batch": (bool, False),
    "yields": (bool, False),
    "anybody": (bool, False),
}


@dataclass(frozen=True, slots=True)
class WireField:
    """One value that travels."""

    name: str
    type: Any
    default: Any

    @property
    def is_required(self) -> bool:
        """Whether it has to be said."""
        return self.default is _REQUIRED

    def of_text(self, text: str) -> Any:
        """Return the value that a text of a query stands for. Raises ``BadRequest``."""
        if self.type is WireRequest:
            return parse_request(text)
        return text if text or self.is_required else self.default


@dataclass(frozen=True, eq=False)
class Form:
    """How one operation travels."""

    operation: Operation
    http: Http
    #: The arguments that are in the path.
    in_path: tuple[str, ...]
    #: What is said in the query, or in the body where there is one.
    fields: tuple[WireField, ...]
    #: None where all is in the query.
    body: type[bodies.Body] | None
    answer: TypeAdapter[Any]
    #: The arguments of the method that are put together again, with their types.
    _arguments: Mapping[str, Any]

    def address(self, arguments: Mapping[str, Any]) -> str:
        """Return the path, below the API's root, that these arguments belong to."""
        path = self.http.path.lstrip("/")
        for name in self.in_path:
            text = quote(str(arguments[name])[:_LONGEST_ID], safe="", errors="replace")
            path = path.replace(_placeholder(name), text)
        return path

    def query(self, arguments: Mapping[str, Any]) -> str:
        """Return what is said in the query; empty for nothing."""
        if self.http.method == "POST":
            return ""
        said = self._said(arguments)
        return urlencode({each.name: _query_text(said[each.name]) for each in self.fields})

    def content(self, arguments: Mapping[str, Any]) -> bytes | None:
        """Return the body that is sent; None for none."""
        if self.body is None:
            return b"{}" if self.http.method == "POST" else None
        said = {name: _text(value) for name, value in self._said(arguments).items()}
        return self.body.model_validate(said).model_dump_json(exclude_unset=True).encode()

    def _said(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        said: dict[str, Any] = {}
        for name in self._arguments:
            value = arguments[name]
            if isinstance(value, Holder):
                own = {"anybody": not value.user}
                said |= {each: own.get(each, getattr(value, each, None)) for each in self.http.holder}
            elif isinstance(value, KernelCommand):
                said |= {each.name: getattr(value, each.name) for each in dataclasses.fields(value)}
            else:
                said[name] = value
        return said

    def arguments(self, said: Mapping[str, Any], user: str) -> dict[str, Any]:
        """Return the arguments of the method, from what ``user`` has said."""
        found: dict[str, Any] = {}
        for name, kind in self._arguments.items():
            if kind is Holder:
                of_holder = {each: said[each] for each in self.http.holder if each != "anybody"}
                found[name] = Holder("" if said.get("anybody") else user, **of_holder)
            elif kind is KernelCommand:
                found[name] = KernelCommand(
                    **{each.name: said[each.name] for each in dataclasses.fields(KernelCommand)}
                )
            else:
                found[name] = said[name]
        return found

    def write(self, answer: Any) -> bytes:
        """Write an answer."""
        if answer is None and self.operation.signature.return_annotation == "None":
            return b"{}"
        if isinstance(answer, PoolStatus):
            names = bodies.StatusBody.model_fields
            answer = bodies.StatusBody.model_construct(**{each: getattr(answer, each) for each in names})
        return self.answer.dump_json(answer)

    def read(self, text: bytes | bytearray, url: str) -> Any:
        """Read an answer of the pool at ``url``. Raises pydantic's ``ValidationError``."""
        found = self.answer.validate_json(text)
        if isinstance(found, bodies.StatusBody):
            return PoolStatus(url, **{each: getattr(found, each) for each in bodies.StatusBody.model_fields})
        return found


@functools.cache
def form_of(operation: Operation) -> Form:
    """Return how an operation travels that is in HTTP."""
    http = operation.http
    assert http is not None, f"{operation.name} is not in HTTP"
    hints = get_type_hints(operation.verb)
    result = hints["return"]
    if get_origin(result) is AsyncIterator:
        (result,) = get_args(result)
    # Those who wait for a change say so in words of their own.
    names = () if operation.poll is not None else operation.signature.parameters
    in_path = tuple(name for name in operation.signature.parameters if _placeholder(name) in http.path)
    arguments = {name: hints[name] for name in names if name not in in_path}
    fields = tuple(each for name in arguments for each in _fields(operation, http, name, hints[name]))
    body = _body(operation, fields) if http.method == "POST" and fields else None
    return Form(operation, http, in_path, fields, body, TypeAdapter(_WIRE.get(result, result)), arguments)


def _placeholder(argument: str) -> str:
    return f"{{{argument.removesuffix('_id')}}}"


def _fields(operation: Operation, http: Http, name: str, kind: Any) -> list[WireField]:
    """Return what travels of one argument."""
    if kind is Holder:
        return [WireField(each, *_OF_HOLDER[each]) for each in http.holder]
    if kind is KernelCommand:
        hints = get_type_hints(KernelCommand)
        return [
            WireField(each.name, _WIRE.get(hints[each.name], hints[each.name]), _default_of(each))
            for each in dataclasses.fields(KernelCommand)
        ]
    default = operation.signature.parameters[name].default
    is_said = name in http.required or default is operation.signature.empty
    return [WireField(name, _WIRE.get(kind, kind), _REQUIRED if is_said else default)]


def _default_of(each: dataclasses.Field[Any]) -> Any:
    return each.default if each.default_factory is _REQUIRED else each.default_factory()


def _body(operation: Operation, fields: tuple[WireField, ...]) -> type[bodies.Body]:
    """Return the model of a body, which is named for the operation."""
    members: dict[str, Any] = {
        each.name: (each.type, ... if each.is_required else each.default) for each in fields
    }
    name = f"{operation.name.title().replace('_', '')}Body"
    return create_model(name, __base__=bodies.Body, __doc__=f"{operation.summary}.", **members)


def _query_text(value: Any) -> Any:
    if value is None:
        return ""
    if isinstance(value, bool):
        return int(value)
    return value.value if isinstance(value, EndReason) else _text(value)


def _text(value: Any) -> Any:
    """Return a text that JSON can carry: what is no character at all becomes ``?``."""
    return value.encode(errors="replace").decode() if isinstance(value, str) else value
