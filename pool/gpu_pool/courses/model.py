"""What a course file can say. The descriptions are what teachers read in their editors."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from math import ceil
from typing import Annotated, Any, Final, TypeAlias, TypeVar
from zoneinfo import ZoneInfo

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic.json_schema import GenerateJsonSchema, JsonSchemaValue
from pydantic_core import PydanticCustomError, core_schema

from gpu_pool.courses.fields import (
    Cores,
    Count,
    Day,
    Flag,
    Home,
    Hours,
    Idle,
    Image,
    Kernels,
    Line,
    Memory,
    Module,
    Number,
    Priority,
    Request,
    Seconds,
    Share,
    YieldAfter,
    Zone,
)
from gpu_pool.courses.hours import Timetable
from gpu_pool.policy.sharing import Course, Quota, check_yield_after
from gpu_pool.policy.yielding import YIELD_AFTER
from gpu_pool_client import BadRequest, SliceRequest, WhenIdle

T = TypeVar("T")

#: Slices, periods and weekly hours of one course.
MOST_ITEMS: Final = 50


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", arbitrary_types_allowed=True)


def _check_some(names: tuple[str, ...]) -> tuple[str, ...]:
    """Refuse a list without names: nobody, or everybody, would be meant."""
    if not names:
        raise BadRequest("is an empty list.", "Name somebody, or remove the line.")
    return names


Names: TypeAlias = Annotated[tuple[Line, ...], AfterValidator(_check_some)]


class Who(_Part):
    """Who is in a course. Without groups and users: everybody."""

    groups: Names = Field(default=(), description="Everybody in these groups.")
    users: Names = Field(default=(), description="These users, by the names they log in with.")

    @property
    def is_everybody(self) -> bool:
        """Whether nobody is left out."""
        return not self.groups and not self.users


#: The kind of error of what an earlier slice of the file has said; ``first`` is that one's number, from 0.
SAID_BEFORE: Final = "said_before"


@dataclass(slots=True)
class _SlicesSoFar:
    """What the slices of the file that is being read have said, and which of them said it first."""

    count: int = 0
    first: dict[tuple[str, Hashable], int] = field(default_factory=dict)


class SliceOffer(_Part):
    """A slice that students may pick."""

    name: Line = Field(description="What students see, such as Small.")
    request: Request = Field(description="How much: 2% of a GPU, 1.5GiB of its memory, 1 for a whole one.")
    default: Flag = Field(
        default=False, description="Whether this slice is preselected; by default the first one is."
    )

    @model_validator(mode="before")
    @classmethod
    def _count(cls, written: Any, info: ValidationInfo) -> Any:
        if isinstance(info.context, _SlicesSoFar):
            info.context.count += 1
        return written

    @field_validator("name", "request", "default")
    @classmethod
    def _check_new(cls, value: Hashable, info: ValidationInfo) -> Hashable:
        """Refuse a second slice of that name or request, and a second default."""
        so_far = info.context
        if value is False or not isinstance(so_far, _SlicesSoFar):
            return value
        here = so_far.count - 1
        first = so_far.first.setdefault((str(info.field_name), value), here)
        if first != here:
            raise PydanticCustomError(SAID_BEFORE, "slice no. {first} has said so", {"first": first})
        return value


def _check_not_none(number: int) -> int:
    if not number:
        raise BadRequest("is 0.", "Accepted: 1 or more; leave it out for the default.")
    return number


class CourseLimits(_Part):
    """How much at most. What is left out is not limited."""

    slices: Count | None = Field(default=None, description="Slices at once; those that wait count.")
    share: Share | None = Field(default=None, description="GPU in all: 50%, or 4 for four whole GPUs.")
    memory: Memory | None = Field(default=None, description="GPU memory in all: 16GiB.")
    gpu_hours_per_week: Number | None = Field(default=None, description="Hours of a whole GPU since Monday.")
    gpu_hours_per_term: Number | None = Field(
        default=None, description="Hours of a whole GPU since the term began."
    )

    @property
    def quota(self) -> Quota:
        """The same as the pool counts it."""
        return Quota(self.slices, self.share, self.memory, self.gpu_hours_per_week, self.gpu_hours_per_term)


class Period(_Part):
    """Some weeks, by their first and last day."""

    first: Day = Field(alias="from", description="The first day.")
    last: Day = Field(alias="to", description="The last day, which is included.")

    @field_validator("last")
    @classmethod
    def _check_order(cls, last: Day, info: ValidationInfo) -> Day:
        first = info.data.get("first")
        if first is not None and last < first:
            raise BadRequest(f"{last} is before {first}.", "Accepted: the same day or a later one.")
        return last


class CourseServer(_Part):
    """The server of each student, on Kubernetes. Elsewhere it means nothing."""

    image: Image | None = Field(default=None, description="The container image.")
    cpu: Cores | None = Field(default=None, description="CPU cores, such as 2 or 0.5.")
    memory: Memory | None = Field(default=None, description="Memory (not of the GPU): 4GiB.")
    home: Home | None = Field(
        default=None,
        description="Size of the home folder: 10GiB; or none, for a folder that is deleted with its pod.",
    )
    kernels: Kernels = Field(
        default="pods",
        description="Where the slice is: each kernel has its own, in a pod; or the server has one, for all.",
    )
    kernel_image: Image | None = Field(
        default=None, description="The container image of kernels in pods; by default image."
    )
    kernel_cpu: Cores | None = Field(
        default=None, description="CPU cores of a kernel in a pod; by default cpu."
    )
    kernel_memory: Memory | None = Field(
        default=None, description="Memory (not of the GPU) of a kernel in a pod; by default memory."
    )
    prepared_pods: Count | None = Field(
        default=None,
        description="How many pods may wait for the first kernels of servers, with preload imported; "
        "they hold no slice. Only where the pool divides whole GPUs (shared).",
    )
    prefer: Line | None = Field(
        default=None, description="GPUs to prefer if there are several kinds: nvlink, or part of a model."
    )
    start_within: Seconds | None = Field(
        default=None, description="How long a server may take to start, including pulling its image: 10min."
    )


def _one_or_more(value: object) -> object:
    """Make a list of what was written without one."""
    return [value] if isinstance(value, str | dict) else value


def _check_number(items: tuple[T, ...]) -> tuple[T, ...]:
    if not 1 <= len(items) <= MOST_ITEMS:
        raise BadRequest(f"there are {len(items)}.", f"Accepted: 1 to {MOST_ITEMS}.")
    return items


def _check_most(items: tuple[T, ...]) -> tuple[T, ...]:
    return _check_number(items) if items else items


class CourseJobs(_Part):
    """The job of each kernel, on Slurm. Elsewhere it means nothing."""

    partition: Line | None = Field(default=None, description="The partition.")
    account: Line | None = Field(default=None, description="The account that it is charged to.")
    qos: Line | None = Field(default=None, description="The quality of service.")
    constraint: Line | None = Field(default=None, description="The features that its node must have.")
    reservation: Line | None = Field(
        default=None, description="The reservation that it is part of, such as one for the class's hours."
    )
    time: Seconds | None = Field(default=None, description="Its time limit: 4h.")
    mem: Memory | None = Field(default=None, description="Its memory (not of the GPU): 8GiB.")
    cpus_per_task: Annotated[Count, AfterValidator(_check_not_none)] | None = Field(
        default=None, description="Its processors."
    )
    prologue: (
        Annotated[
            tuple[Line, ...],
            BeforeValidator(_one_or_more, json_schema_input_type=Line | tuple[Line, ...]),
            AfterValidator(_check_most),
        ]
        | None
    ) = Field(
        default=None,
        description="Lines of shell that it runs first, as the student, such as module load cuda.",
    )

    @property
    def options(self) -> dict[str, str]:
        """What is said, by the long names of sbatch's options."""
        said = self.model_dump(exclude={"time", "mem", "cpus_per_task", "prologue"}, exclude_none=True)
        if self.time is not None:
            said["time"] = str(ceil(self.time / 60))  # never 0, which Slurm takes for no limit
        if self.mem is not None:
            said["mem"] = f"{self.mem}M"
        if self.cpus_per_task is not None:
            said["cpus-per-task"] = str(self.cpus_per_task)
        return said


class CourseFile(_Part):
    """A course: who may use which slices of the GPUs, how many, and when."""

    model_config = ConfigDict(title="A course of jupyter-gpu-pool")

    title: Line = Field(description="The course's name for people.")
    who: Who = Field(default=Who(), description="Who is in the course; without it, everybody.")
    instructors: Names = Field(default=(), description="Users who teach it. They may always use it.")
    slices: Annotated[tuple[SliceOffer, ...], AfterValidator(_check_number)] = Field(
        description="What students may pick."
    )
    any_up_to: Request | None = Field(
        default=None,
        description="The largest slice that may be asked for besides those offered; without it, only those.",
    )
    per_user: CourseLimits = Field(
        default=CourseLimits(), description="How much each user may have in this course."
    )
    quota: CourseLimits = Field(
        default=CourseLimits(), description="How much all its users together may have."
    )
    weight: Number = Field(
        default=1.0,
        description="Its share of the pool when courses compete, in proportion; 0: only what others leave.",
    )
    priority: Priority = Field(default=0, description="A higher priority comes before all lower ones.")
    batch: Flag = Field(
        default=False,
        description="Whether all that is asked for in its name is batch work, such as grading: "
        "it comes after everybody else, whatever its priority.",
    )
    longest_lease: Seconds | None = Field(default=None, description="How long a slice may be kept at most.")
    idle_limit: Seconds | None = Field(
        default=None,
        description="After how long the slice of an idle kernel is lent to others, where that is possible.",
    )
    yield_after: YieldAfter = Field(
        default=YIELD_AFTER,
        description="After how long it is lent to somebody who waits for one, where that is possible, and "
        "sooner to one who has waited for as long: 60s; or never.",
    )
    when_idle: Idle = Field(
        default=WhenIdle.KEEP,
        description="Where that is not possible: keep the slice, or end the kernel after a warning.",
    )
    warn_before: Seconds = Field(
        default=300.0, description="How long before a kernel is ended its user is warned."
    )
    keep_at_most: Seconds = Field(
        default=7_200.0, description="How long a user can keep an idle slice at a time."
    )
    hibernate_after: Seconds | None = Field(
        default=None,
        description="After how long an idle kernel sleeps on disk until its next cell, where its server can "
        "do that.",
    )
    preload: (
        Annotated[
            tuple[Module, ...],
            BeforeValidator(_one_or_more, json_schema_input_type=Module | tuple[Module, ...]),
            AfterValidator(_check_most),
        ]
        | None
    ) = Field(
        default=None,
        description="Python modules that kernels have imported when they start: numpy, torch. On a shared "
        "machine; kernels in pods start without.",
    )
    preload_with_server: Flag = Field(
        default=False,
        description="Whether that is prepared when a student's server starts, so that the first kernel has "
        "them, too; by default after the first one has started.",
    )
    weeks: Annotated[
        tuple[Period, ...],
        BeforeValidator(_one_or_more, json_schema_input_type=Period | tuple[Period, ...]),
        AfterValidator(_check_number),
    ] = Field(default=(), description="When the course runs, from a day to a day; without it, always.")
    hours: Annotated[
        tuple[Hours, ...],
        BeforeValidator(_one_or_more, json_schema_input_type=Hours | tuple[Hours, ...]),
        AfterValidator(_check_number),
    ] = Field(default=(), description="When it is open in these weeks; without it, at all hours.")
    time_zone: Zone | None = Field(
        default=None,
        validate_default=True,
        description="The time zone of weeks and hours, such as Europe/Berlin.",
    )
    kubernetes: CourseServer = Field(
        default=CourseServer(), description="The server of each student, on Kubernetes."
    )
    slurm: CourseJobs = Field(default=CourseJobs(), description="The job of each kernel, on Slurm.")

    @classmethod
    def read(cls, tree: object) -> CourseFile:
        """Read what a file says. Raises pydantic's ``ValidationError`` with all that is wrong with it."""
        return cls.model_validate(tree, context=_SlicesSoFar())

    @field_validator("time_zone")
    @classmethod
    def _check_zone(cls, zone: Zone | None, info: ValidationInfo) -> Zone | None:
        if zone is None and (info.data.get("weeks") or info.data.get("hours")):
            raise BadRequest(
                "is missing: weeks and hours need one.", "Add, for example, time_zone: Europe/Berlin."
            )
        return zone

    @field_validator("yield_after")
    @classmethod
    def _check_yield_after(cls, value: float | None, info: ValidationInfo) -> float | None:
        check_yield_after(value, info.data.get("idle_limit"))
        return value

    @field_validator("preload_with_server")
    @classmethod
    def _check_preload(cls, value: bool, info: ValidationInfo) -> bool:
        if value and info.data.get("preload", ()) is None:
            raise BadRequest("is true, and there is no preload.", "Name modules, such as preload: [numpy].")
        return value

    @property
    def default_slice(self) -> SliceOffer:
        """The slice that is chosen unless another one is."""
        return next((offer for offer in self.slices if offer.default), self.slices[0])

    @property
    def requests(self) -> tuple[SliceRequest, ...]:
        """What is offered, in the file's order."""
        return tuple(offer.request for offer in self.slices)

    @property
    def timetable(self) -> Timetable:
        """When it is open."""
        weeks = tuple(sorted((period.first, period.last) for period in self.weeks))
        return Timetable(ZoneInfo(self.time_zone or "UTC"), weeks, self.hours)

    def course(self, name: str) -> Course:
        """Return what queue, quotas and terms need to know of it."""
        return Course(
            name=name,
            weight=self.weight,
            priority=self.priority,
            batch=self.batch,
            quota=self.quota.quota,
            per_user=self.per_user.quota,
            longest_lease=self.longest_lease,
            idle_limit=self.idle_limit,
            when_idle=self.when_idle,
            warn_before=self.warn_before,
            keep_at_most=self.keep_at_most,
            yield_after=self.yield_after,
            hibernate_after=self.hibernate_after,
        )


class _ForEditors(GenerateJsonSchema):
    """Says what may be written: a field that is left out is not written as nothing."""

    def nullable_schema(self, schema: core_schema.NullableSchema) -> JsonSchemaValue:
        """Describe the value."""
        return self.generate_inner(schema["schema"])

    def default_schema(self, schema: core_schema.WithDefaultSchema) -> JsonSchemaValue:
        """Describe the value, with its default if it has one."""
        described = super().default_schema(schema)
        if described.get("default", ...) is None:
            del described["default"]
        return described


def json_schema() -> dict[str, Any]:
    """Return the JSON Schema by which editors check and complete course files."""
    schema = CourseFile.model_json_schema(schema_generator=_ForEditors)
    return {"$schema": _ForEditors.schema_dialect, **schema}
