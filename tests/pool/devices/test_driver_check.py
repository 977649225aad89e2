"""Whether new processes can use the devices, asked by a pool's process whatever else that does."""

from __future__ import annotations

from gpu_pool.devices.driver_check import DriverCheck
from gpu_pool_client import Device
from support.many_files import many_files


async def test_it_is_known_also_where_many_files_are_open() -> None:
    check = DriverCheck()
    with many_files():
        # No machine has this one; what is said of it is the library's, or that there is none.
        assert await check.faults([Device("GPU-of-nobody", 0, "V100", 1)], max_age=0.0, patience=60.0)
        check.close()
