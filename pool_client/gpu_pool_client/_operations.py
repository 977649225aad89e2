"""What a row of the table of operations says: who may use a verb, what it costs, and where it is in HTTP.

Each verb of the contract carries its row, so that its signature, its docstring and its row stand at one
place: the methods of :class:`~gpu_pool_client.Pool`. From the rows come the client of a service
(``_remote``), the service's routes, its checks and what it counts, its description (OpenAPI), and what the
contract suite has to go through.
"""

from __future__ import annotations

import enum
import inspect
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final, Literal, TypeVar

F = TypeVar("F", bound=Callable[..., Any])

Method = Literal["GET", "POST", "DELETE"]
#: The attribute of a method in which its row is.
_ROW: Final = "operation"


class Principal(enum.Enum):
    """What somebody who asks is to the pool, or to the lease in question."""

    ADMINISTRATOR = "administrators"
    USER = "every user, for themselves"
    SERVICE = "services of the JupyterHub"
    OWNER = "the lease's user"
    INSTRUCTOR = "instructors of the lease's course"
    PROCESS = "the process that asked for the lease"
    NODE_AGENT = "node agents, for their own node"


#: Who may see and end a lease, and change what is not its process's alone.
OWNERS: Final = frozenset((Principal.OWNER, Principal.ADMINISTRATOR))
#: The same, and those who may see it besides.
READERS: Final = OWNERS | {Principal.INSTRUCTOR}
USERS: Final = frozenset((Principal.USER, Principal.ADMINISTRATOR))
ADMINISTRATORS: Final = frozenset((Principal.ADMINISTRATOR,))
NODE_AGENTS: Final = frozenset((Principal.NODE_AGENT,))


class Sight(enum.Enum):
    """What of an answer somebody sees."""

    EVERYTHING = "everything"
    OWN = "their own leases"
    COURSES = "their own leases and those of the courses that they teach"
    NO_LEASES = "no leases"


class Cost(enum.Enum):
    """What it counts as, where users may do only so much a minute."""

    NOTHING = "nothing"
    ONE_AT_A_TIME = "nothing, but each user is answered one at a time"
    QUESTION = "a question, one at a time"
    DECISION = "a change"
    REQUEST = "a change, and a new lease"
    REPORT = "a report, of which so many a minute are taken"


@dataclass(frozen=True, slots=True)
class Http:
    """Where an operation is in HTTP.

    Arguments that are not in the path are in the query, or in the body of a POST.
    """

    method: Method
    #: Below the API's root. ``{lease}`` stands for the argument ``lease_id``, ``{device}`` for ``device``.
    path: str
    #: What of a ``Holder`` is said; the service knows by itself who asks. ``anybody`` is one without a name.
    holder: tuple[str, ...] = ()
    #: Arguments that have to be said although they have defaults.
    required: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class LongPoll:
    """How a client waits for a change: it asks again and again, and the service takes its time to answer."""

    #: What the client says besides the seconds for which it waits.
    says: Literal["last", "seen"]
    #: The HTTP status that says, without a body, that nothing has changed, and what it means. None where
    #: what has not changed is sent again.
    unchanged: int | None = None
    meaning: str = ""


@dataclass(frozen=True, eq=False)
class Operation:
    """One verb of the contract: a row of the table."""

    #: The method of the contract: its signature has the arguments and the result.
    verb: Callable[..., Any]
    may: frozenset[Principal]
    #: None for what a service's pages do, and clients cannot.
    http: Http | None
    cost: Cost
    #: For changes: what the service's log says is done; filled in with the arguments.
    decision: str
    #: What of the answer each principal sees; whoever is not here sees all of it.
    sees: Mapping[Principal, Sight]
    poll: LongPoll | None
    #: Whether twice is the same as once: then it may be repeated where nobody knows whether it was heard.
    idempotent: bool
    #: What those are told who may not: the message, and what to do.
    refusal: tuple[str, str]
    #: What a pool says that does not have it: the message, and what to do.
    missing: tuple[str, str]

    @property
    def name(self) -> str:
        """The verb."""
        return str(self.verb.__name__)

    @property
    def summary(self) -> str:
        """What it does: the first line of the verb's docstring, without the full stop."""
        return (inspect.getdoc(self.verb) or "").partition("\n")[0].rstrip(".")

    @property
    def is_of_lease(self) -> bool:
        """Whether it is about one lease."""
        return "lease_id" in self.signature.parameters

    @cached_property
    def signature(self) -> inspect.Signature:
        """What it takes, without the pool."""
        found = inspect.signature(self.verb)
        _, *parameters = found.parameters.values()
        return found.replace(parameters=parameters)

    def bind(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Return the arguments of a call by name, those that have not been given by their defaults."""
        bound = self.signature.bind(*args, **kwargs)
        bound.apply_defaults()
        return bound.arguments


def operation(
    http: Http | None,
    *,
    may: Collection[Principal],
    cost: Cost = Cost.NOTHING,
    decision: str = "",
    sees: Mapping[Principal, Sight] | None = None,
    poll: LongPoll | None = None,
    idempotent: bool = True,
    refusal: tuple[str, str] = ("You may not do that.", "Ask the administrator."),
    missing: tuple[str, str] = ("This pool cannot do that.", "Ask the administrator."),
) -> Callable[[F], F]:
    """Give a method of the contract its row. See :class:`Operation` for what each field means."""

    def with_row(verb: F) -> F:
        row = Operation(
            verb, frozenset(may), http, cost, decision, sees or {}, poll, idempotent, refusal, missing
        )
        verb.__dict__[_ROW] = row
        return verb

    return with_row


def operation_of(verb: Callable[..., Any]) -> Operation:
    """Return the row of a method of the contract."""
    found: Operation = verb.__dict__[_ROW]
    return found


def operations_of(contract: type) -> tuple[Operation, ...]:
    """Return the table: the rows of a contract's methods, in the order in which they are written."""
    return tuple(
        member.__dict__[_ROW]
        for each in contract.__mro__
        for member in vars(each).values()
        if inspect.isfunction(member) and _ROW in member.__dict__
    )
