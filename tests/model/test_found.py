"""What the model has found, each on its own."""

from __future__ import annotations

from pathlib import Path

from gpu_pool.courses.admission import CourseAdmission
from gpu_pool.enforcement.watchdog import OwnStore
from gpu_pool.settings import PoolSettings
from gpu_pool_client import EndReason, Holder, LeaseState
from support.pools import device, embedded, take

_LAB = "title: Lab\npriority: 2\nslices: [{name: Whole, request: 1}]\n"


async def test_a_device_that_appears_serves_the_line_by_the_course_files_too(tmp_path: Path) -> None:
    (tmp_path / "courses").mkdir()
    (tmp_path / "courses" / "lab.yaml").write_text(_LAB)
    path, settings = tmp_path / "store.db", {"courses_dir": str(tmp_path / "courses")}
    async with embedded(path, device(0), **settings) as pool:
        await take(pool, "1", "first", Holder("ada", "lab"))
        second = await take(pool, "1", "second", Holder("carl"))
        preferred = await take(pool, "1", "third", Holder("bob", "lab"))
        assert [lease.id for lease in (await pool.status()).queue] == [preferred, second]
        async with embedded(path, device(0), device(1), **settings) as later:
            assert (await later.get_lease(preferred)).state is LeaseState.HELD
            assert (await later.get_lease(second)).state is LeaseState.WAITING


async def test_a_lease_that_the_guard_ends_makes_room_by_the_course_files_too(tmp_path: Path) -> None:
    (tmp_path / "courses").mkdir()
    (tmp_path / "courses" / "lab.yaml").write_text(_LAB)
    path, settings = tmp_path / "store.db", {"courses_dir": str(tmp_path / "courses")}
    async with embedded(path, device(0), **settings) as pool:
        first = await take(pool, "1", "first", Holder("ada", "lab"))
        await take(pool, "1", "second", Holder("carl"))
        preferred = await take(pool, "1", "third", Holder("bob", "lab"))
        rules = PoolSettings(**settings)
        store = OwnStore(path, rules, CourseAdmission(rules))
        store.end(first, EndReason.OVER_MEMORY)
        store.close()
        assert (await pool.get_lease(preferred)).state is LeaseState.HELD
