"""The pool in numbers: what is counted, once, with labels that nobody can multiply; and who may read it."""

from __future__ import annotations

import asyncio
import json
import re
import textwrap
import time
from collections.abc import AsyncIterator, Collection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from gpu_pool.devices.inventory import Reading
from gpu_pool.pool.pool import GpuPool
from gpu_pool.service.connections import is_within, read_networks
from gpu_pool.service.metrics import Metrics
from gpu_pool.store import records
from gpu_pool_client import BadRequest, Device, EndReason, Holder, PoolStatus, Process, parse_request
from gpu_pool_client._remote.exchange import ServerAddress, ask
from support.clocked import DAY, YEAR, SetClock, clocked_pool
from support.hub import ADMIN as HUB_ADMIN
from support.hub import PREFIX, Hub, serving_hub
from support.pools import device, embedded
from support.service import ForkServer, Service
from support.users import SOMEBODY, Users

EXAMPLES = Path(__file__).parents[3] / "examples" / "monitoring"
GIB = 1024**3
MIB = 1024**2


class Numbers:
    """A pool, and what is told of it."""

    def __init__(self, pool: GpuPool) -> None:
        self.pool = pool
        self.metrics = Metrics(pool, lambda: ("ml", "nlp"))
        self._count = 0

    async def take(self, size: str, course: str | None = "ml") -> str:
        self._count += 1
        holder = Holder("ada", course, None, Process.current())
        return (await self.pool.request(parse_request(size), holder, f"key-{self._count}")).id

    async def names(self) -> set[str]:
        return {name for name, _ in await self.samples()}

    async def value(self, name: str, **labels: str) -> float:
        """The sum of all samples of that name which have these labels."""
        samples = await self.samples()
        return sum(
            value for (found, those), value in samples.items() if found == name and labels.items() <= {*those}
        )

    async def samples(self) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
        body, media_type = await self.metrics.page()
        assert media_type.startswith("text/plain; version=0.0.4")
        families = list(text_string_to_metric_families(body.decode()))
        assert len({family.name for family in families}) == len(families)
        return {
            (sample.name, frozenset(sample.labels.items())): sample.value
            for family in families
            for sample in family.samples
        }


@pytest.fixture
async def numbers(tmp_path: Path) -> AsyncIterator[Numbers]:
    courses: dict[str, Any] = {name: {} for name in ("ml", "nlp", "secret-1", "secret-2")}
    async with embedded(tmp_path / "store.db", device(0), device(1), courses=courses) as pool:
        yield Numbers(pool)


async def test_devices_have_memory_and_share_held_and_free(numbers: Numbers) -> None:
    await numbers.take("25%")
    await numbers.pool.drain("1")
    for name, first, second in (
        ("memory_bytes", 32 * GIB, 32 * GIB),
        ("memory_held_bytes", 8 * GIB, 0),
        ("memory_free_bytes", 24 * GIB, 0),
        ("share_held", 0.25, 0),
        ("share_free", 0.75, 0),
        ("leases", 1, 0),
        ("drained", 0, 1),
        ("info", 1, 1),
    ):
        found = [await numbers.value(f"gpu_pool_device_{name}", index=str(index)) for index in (0, 1)]
        assert found == [first, second], name
    assert await numbers.value("gpu_pool_device_info", simulated="true", model="V100-SXM2-32GB") == 2


async def test_courses_have_leases_memory_and_a_line(numbers: Numbers) -> None:
    await numbers.take("50%")
    await numbers.take("25%", None)
    await numbers.take("2", "nlp")
    assert await numbers.value("gpu_pool_held_memory_bytes", course="ml") == 16 * GIB
    assert await numbers.value("gpu_pool_held_share", course="none") == 0.25
    assert await numbers.value("gpu_pool_leases", course="ml", state="held") == 1
    assert await numbers.value("gpu_pool_queue_length", course="nlp") == 1
    assert await numbers.value("gpu_pool_queue_length", course="ml") == 0
    assert await numbers.value("gpu_pool_queue_wanted_share") == 2
    assert 0 < await numbers.value("gpu_pool_queue_longest_wait_seconds") < 60


async def test_what_is_lent_on_top_is_told_by_course(numbers: Numbers) -> None:
    await numbers.take("2%..50%")
    await numbers.take("10%", "nlp")
    await numbers.pool.core.reconciler.once()
    assert await numbers.value("gpu_pool_burst_memory_bytes", course="ml") == (16384 - 655) * MIB
    assert await numbers.value("gpu_pool_burst_memory_bytes", course="nlp") == 0
    assert await numbers.value("gpu_pool_held_memory_bytes", course="ml") == 655 * MIB


async def test_what_could_be_used_on_top_is_counted_once_it_has_ended(numbers: Numbers) -> None:
    lease = await numbers.take("2%..50%")
    await numbers.pool.core.reconciler.once()
    assert await numbers.value("gpu_pool_burst_byte_seconds_total") == 0
    await numbers.pool.release(lease)
    (row,) = await numbers.pool.history()
    for _ in range(2):
        counted = await numbers.value("gpu_pool_burst_byte_seconds_total", course="ml")
        assert counted == row.burst_mib_seconds * MIB > 0


async def test_nobody_multiplies_labels(numbers: Numbers) -> None:
    await numbers.take("10%", "secret-1")
    await numbers.pool.release(await numbers.take("10%", "secret-2"))
    labels = {pair for _, pairs in await numbers.samples() for pair in pairs}
    assert {value for name, value in labels if name == "course"} == {"ml", "nlp", "none", "other"}
    assert not any("ada" in value for _, value in labels)


async def test_what_ends_is_counted_once_by_course_and_reason(numbers: Numbers) -> None:
    await numbers.pool.release(await numbers.take("10%"))
    await numbers.pool.release(await numbers.take("10%"), EndReason.REVOKED)
    for _ in range(3):
        assert await numbers.value("gpu_pool_leases_ended_total", course="ml", reason="released") == 1
        assert await numbers.value("gpu_pool_leases_ended_total", reason="revoked") == 1
    await numbers.pool.release(await numbers.take("10%"))
    assert await numbers.value("gpu_pool_leases_ended_total", reason="released") == 2


async def test_two_who_read_at_once_count_nothing_twice(numbers: Numbers) -> None:
    for _ in range(5):
        await numbers.pool.release(await numbers.take("10%"))
    await asyncio.gather(*(numbers.metrics.page() for _ in range(3)))
    assert await numbers.value("gpu_pool_leases_ended_total", reason="released") == 5
    assert await numbers.value("gpu_pool_grant_seconds_count", course="ml") == 5


async def test_every_first_grant_is_counted_once(numbers: Numbers) -> None:
    short = await numbers.take("10%")
    await numbers.take("10%")
    assert await numbers.value("gpu_pool_grant_seconds_count", course="ml") == 2
    await numbers.pool.release(short)
    unseen = await numbers.take("10%")
    await numbers.pool.release(unseen)
    for _ in range(3):
        assert await numbers.value("gpu_pool_grant_seconds_count", course="ml") == 3


async def test_a_slice_that_comes_back_is_no_new_grant(numbers: Numbers) -> None:
    lease = await numbers.take("10%")
    assert await numbers.value("gpu_pool_grant_seconds_count") == 1
    await numbers.pool.park(lease)
    assert await numbers.value("gpu_pool_leases_parked") == 1
    await numbers.pool.resume(lease)
    assert await numbers.value("gpu_pool_grant_seconds_count") == 1


async def test_what_others_could_have_of_a_lease_is_counted_once_it_has_ended(numbers: Numbers) -> None:
    lease = await numbers.take("10%")
    await numbers.pool.park(lease)
    await numbers.pool.resume(lease)
    assert await numbers.value("gpu_pool_lent_gpu_seconds_total") == 0
    await numbers.pool.release(lease)
    (row,) = await numbers.pool.history()
    for _ in range(2):
        assert await numbers.value("gpu_pool_lent_gpu_seconds_total", course="ml") == row.lent_gpu_seconds > 0


async def test_a_wait_ends_with_the_first_grant_also_where_that_was_not_seen(numbers: Numbers) -> None:
    began = time.monotonic()
    resumed, resized = await numbers.take("10%"), await numbers.take("10%")
    took = time.monotonic() - began
    await numbers.pool.park(resumed)
    await asyncio.sleep(1)
    await numbers.pool.resume(resumed)
    await numbers.pool.resize(resized, parse_request("20%"))
    assert await numbers.value("gpu_pool_grant_seconds_count") == 2
    assert await numbers.value("gpu_pool_grant_seconds_sum") <= 2 * took


async def test_what_was_before_the_service_is_not_counted(numbers: Numbers) -> None:
    await numbers.take("10%")
    await numbers.pool.release(await numbers.take("10%"))
    later = Metrics(numbers.pool, lambda: ("ml",))
    numbers.metrics = later
    assert await numbers.value("gpu_pool_grant_seconds_count") == 0
    assert await numbers.value("gpu_pool_leases_ended_total") == 0


@pytest.mark.parametrize("jump", [-55 * YEAR, -DAY, DAY, 10 * YEAR])
async def test_each_end_and_grant_is_counted_once_whatever_the_clock_does(
    tmp_path: Path, jump: float
) -> None:
    times = SetClock(time.time())
    async with clocked_pool(tmp_path / "store.db", times) as pool:
        numbers = Numbers(pool)
        assert await numbers.value("gpu_pool_leases_ended_total") == 0
        for count, ahead in enumerate([0.0, jump, jump, 0.0, 0.0, jump, 0.0], start=1):
            times.ahead = ahead
            times.uptime += 10
            await pool.release(await numbers.take("10%"))
            for _ in range(2):
                assert await numbers.value("gpu_pool_leases_ended_total", reason="released") == count
                assert await numbers.value("gpu_pool_grant_seconds_count") == count
        for ahead in (jump, 0.0, jump):  # three that nobody has read in between
            times.ahead = ahead
            await pool.release(await numbers.take("10%"))
        assert await numbers.value("gpu_pool_leases_ended_total", reason="released") == 10


async def test_what_is_granted_after_the_clock_was_put_back_is_counted(tmp_path: Path) -> None:
    times = SetClock(time.time() + 10 * DAY)
    async with clocked_pool(tmp_path / "store.db", times) as pool:
        numbers = Numbers(pool)
        await numbers.take("10%")
        assert await numbers.value("gpu_pool_grant_seconds_count") == 1
        times.ahead -= 20 * DAY
        ended = await numbers.take("10%")
        assert await numbers.value("gpu_pool_grant_seconds_count") == 2
        await pool.release(ended)
        await pool.release(await numbers.take("10%"))
        assert await numbers.value("gpu_pool_grant_seconds_count") == 3


async def test_a_lease_that_ends_while_the_numbers_are_read_is_granted_once(
    numbers: Numbers, monkeypatch: pytest.MonkeyPatch
) -> None:
    lease, status = await numbers.take("10%"), numbers.pool.status

    async def then_it_ends() -> PoolStatus:
        told = await status()
        await numbers.pool.release(lease)
        return told

    monkeypatch.setattr(numbers.pool, "status", then_it_ends)
    assert await numbers.value("gpu_pool_grant_seconds_count") == 1


async def test_what_nobody_has_counted_is_kept_until_it_is(tmp_path: Path) -> None:
    times = SetClock(time.time())
    async with clocked_pool(tmp_path / "store.db", times, history_days=1) as pool:
        numbers = Numbers(pool)
        assert await numbers.value("gpu_pool_leases_ended_total") == 0
        for count in range(3, 12, 3):
            for ahead in (-10 * DAY, 10 * DAY, 0.0):
                times.ahead = ahead
                await pool.release(await numbers.take("10%"))
                await pool.store.run(records.forget_old)
            assert await numbers.value("gpu_pool_leases_ended_total") == count
            assert await numbers.value("gpu_pool_grant_seconds_count") == count
        assert await pool.store.run(records.forget_old), "then it becomes sums"


async def test_requests_are_counted_by_outcome(numbers: Numbers) -> None:
    class Leases(SimpleNamespace):
        def get_status(self) -> int:
            return int(self.status)

    for status in (200, 200, 429):
        numbers.metrics.answered(Leases(status=status))  # type: ignore[arg-type]
    assert await numbers.value("gpu_pool_requests_total", request="leases", outcome="ok") == 2
    assert await numbers.value("gpu_pool_requests_total", outcome="too-many-requests") == 1


@pytest.mark.parametrize(
    ("address", "networks", "is_in"),
    [
        ("127.0.0.1", ["127.0.0.0/8"], True),
        ("::1", ["127.0.0.0/8", "::1"], True),
        ("10.1.2.3", ["10.1.0.0/16"], True),
        ("10.2.2.3", ["10.1.0.0/16"], False),
        ("127.0.0.1", [], False),
        ("0.0.0.0", ["127.0.0.0/8"], False),
        ("", ["0.0.0.0/0"], False),
    ],
)
def test_networks_that_may_read_without_a_token(address: str, networks: list[str], is_in: bool) -> None:
    assert is_within(address, read_networks(networks, "metrics_from")) is is_in


def test_a_network_that_is_none_is_refused_in_words() -> None:
    with pytest.raises(BadRequest, match="'everybody' does not appear to be an IPv4 or IPv6 network"):
        read_networks(["everybody"], "metrics_from")


async def read(url: Path | ServerAddress, path: str = "/metrics", **headers: str) -> tuple[int, str]:
    more = {name.replace("_", "-"): value for name, value in headers.items()}
    answer = await ask(url, "GET", path, None, 20, more)
    return answer.status, bytes(answer.body).decode()


async def test_an_administrator_reads_them_at_the_socket(service: Service) -> None:
    await read(service.socket, "/api/v1/status")
    status, text = await read(service.socket)
    assert status == 200
    assert 'gpu_pool_requests_total{outcome="ok",request="status"} 1.0' in text


async def test_others_do_not_read_them_there(service: Service, users: Users) -> None:
    where = str(service.socket)
    body = f"""
    from gpu_pool_client._remote.exchange import ask
    answer = await ask(__import__("pathlib").Path({where!r}), "GET", "/metrics", None, 20, {{}})
    return answer.status
    """
    assert await users.run(SOMEBODY, textwrap.dedent(body)) == 403


async def test_behind_a_hub_they_are_for_administrators_and_named_networks(
    children: ForkServer, hub: Hub, folder: Path
) -> None:
    where, path = ServerAddress("127.0.0.1", hub.service_port), f"{PREFIX}metrics"
    student, admin = [f"token {await hub.token(name)}" for name in ("ada", HUB_ADMIN)]
    async with serving_hub(children, hub, folder / "closed"):
        assert (await read(where, path))[0] == 401
        assert (await read(where, path, Authorization=student))[0] == 403
        status, text = await read(where, path, Authorization=admin)
        assert (status, "gpu_pool_device_info" in text) == (200, True)
    async with serving_hub(children, hub, folder / "open", "c.ServeApp.metrics_from = ['127.0.0.0/8']"):
        assert (await read(where, path))[0] == 200
        assert (await read(where, path, X_Forwarded_For="8.8.8.8"))[0] == 401


async def everything(numbers: Numbers) -> set[str]:
    """The names of all numbers that there are once something has happened."""
    await numbers.pool.release(await numbers.take("10%"))
    lease = await numbers.take("10%")
    # As a watchdog or the agents of nodes see it.
    numbers.pool.backend.memory_in_use = lambda: {lease: {"GPU-1": 1}}  # type: ignore[method-assign]
    numbers.pool.backend.agents = SimpleNamespace(ages=lambda: {"n1": 5.0})  # type: ignore[assignment]
    numbers.metrics.answered(SimpleNamespace(get_status=lambda: 200))  # type: ignore[arg-type]
    numbers.pool.core.read_devices = _everything_of  # type: ignore[method-assign] # as real devices tell it
    return await numbers.names()


async def _everything_of(devices: Collection[Device]) -> dict[str, Reading | None]:
    return {each.uuid: Reading(0, 0.0, 0.0, 0.0) for each in devices}


@pytest.mark.parametrize("name", ["gpu-pool-alerts.yml", "grafana-dashboard.json", "scale-on-queue.yml"])
async def test_the_examples_use_numbers_that_there_are(numbers: Numbers, name: str) -> None:
    text = (EXAMPLES / name).read_text()
    used = set(re.findall(r"\bgpu_pool_[a-z_]+", text))
    assert used
    assert used <= await everything(numbers)


def test_the_alerts_are_rules_that_prometheus_reads() -> None:
    (group,) = yaml.safe_load((EXAMPLES / "gpu-pool-alerts.yml").read_text())["groups"]
    for rule in group["rules"]:
        assert {"alert", "expr", "labels", "annotations"} <= rule.keys()
        assert {"summary", "description"} == rule["annotations"].keys()
    reasons = re.findall(r'reason="([^"]+)"', str(group))
    assert {EndReason(each) for each in reasons} == {EndReason.OVER_MEMORY, EndReason.NOT_ENFORCED}


def test_the_panels_of_the_dashboard_do_not_overlap() -> None:
    panels = json.loads((EXAMPLES / "grafana-dashboard.json").read_text())["panels"]
    taken = [
        (x, y)
        for panel in panels
        for x in range(panel["gridPos"]["x"], panel["gridPos"]["x"] + panel["gridPos"]["w"])
        for y in range(panel["gridPos"]["y"], panel["gridPos"]["y"] + panel["gridPos"]["h"])
    ]
    assert len(set(taken)) == len(taken)
    assert len({panel["id"] for panel in panels}) == len(panels)
