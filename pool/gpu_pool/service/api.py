"""The web applications of the service: its API, for whoever identifies callers."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

from tornado.web import Application

from gpu_pool.courses import CourseFolder, Courses
from gpu_pool.embedded.pool import EmbeddedPool
from gpu_pool.service.addresses import Network
from gpu_pool.service.authorized_pool import AuthorizedPool
from gpu_pool.service.callers import Identify
from gpu_pool.service.event_streams import EventStreams
from gpu_pool.service.handler import InFlightRequests
from gpu_pool.service.handlers import NothingHandler
from gpu_pool.service.lease_changes import LeaseChanges
from gpu_pool.service.metrics import Metrics, MetricsHandler
from gpu_pool.service.openapi import describe
from gpu_pool.service.routes import ROUTES
from gpu_pool.settings import PoolSettings
from gpu_pool_client.remote import bodies


@dataclass(frozen=True, slots=True)
class ApiOptions:
    """What all applications of one service share."""

    pool: EmbeddedPool
    desk: AuthorizedPool
    changes: LeaseChanges
    under_way: InFlightRequests
    log: logging.Logger
    settings: PoolSettings
    streams: EventStreams
    #: Names of administrators.
    admins: Collection[str]
    #: What the course files say, as of now.
    courses: Callable[[], Courses]
    #: Where these files are; None where there are none.
    folder: CourseFolder | None = None
    #: Seconds in which a client must have taken its answer.
    taken_within: float = 30.0
    #: None where nothing is counted, since what counts is not installed.
    metrics: Metrics | None = None
    #: Networks from which the metrics may be read without a token.
    metrics_from: Collection[Network] = ()
    #: What is to be called when the service stops.
    stops: list[Callable[[], None]] = field(default_factory=list)


def api(
    options: ApiOptions,
    identify: Identify,
    prefix: str = "/",
    more: Sequence[tuple[Any, ...]] = (),
    **settings: Any,
) -> Application:
    """Return the application with the API below ``prefix``, and with ``more`` routes."""
    shared = {
        "desk": options.desk,
        "identify": identify,
        "under_way": options.under_way,
        "log": options.log,
    }
    root = prefix.rstrip("/") + bodies.API
    metrics = options.metrics
    counted = {**shared, "metrics": metrics, "networks": options.metrics_from}
    return Application(
        [
            *((re.escape(root) + route.pattern, route.handler, shared) for route in ROUTES),
            (f"{re.escape(prefix)}api/.*", NothingHandler, shared),
            *([(f"{re.escape(prefix)}metrics", MetricsHandler, counted)] if metrics else []),
            *more,
        ],
        default_handler_class=NothingHandler,
        default_handler_args=shared,
        description=describe(ROUTES, root),
        streams=options.streams,
        taken_within=timedelta(seconds=options.taken_within),
        # Decisions are logged where they are made.
        log_function=metrics.answered if metrics else lambda _: None,
        **settings,
    )
