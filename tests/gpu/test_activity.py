"""What the pool sees of a process that uses its slice, and when the slice may be lent to others."""

from __future__ import annotations

import pytest

from gpu_pool_client import Activity, LeaseState, NotAllowed
from support.gpu import Occupant, SharedDevice, run, until

pytestmark = pytest.mark.gpu

START = (
    "import torch; torch.cuda.init(); one = torch.randn(4096, 4096, device='cuda'); torch.cuda.synchronize()"
)

COMPUTE = """
import threading
stop = threading.Event()

def work():
    while not stop.is_set():
        for _ in range(20):
            one @ one
        torch.cuda.synchronize()

worker = threading.Thread(target=work, daemon=True)
worker.start()
"""


def activity(shared: SharedDevice, occupant: Occupant) -> Activity:
    return run(shared.pool.activity(occupant.lease.id))


def test_a_process_that_only_imported_pytorch_has_not_initialised_cuda(shared: SharedDevice) -> None:
    occupant = shared.take("10%")
    occupant.child.ask("import torch")
    assert activity(shared, occupant).initialised is False


def test_a_process_that_initialised_cuda_is_seen_to_have(shared: SharedDevice) -> None:
    occupant = shared.take("10%")
    occupant.child.ask("import torch; torch.cuda.init()")
    assert activity(shared, occupant).initialised is True


def test_a_process_works_while_it_computes_and_not_long_after(shared: SharedDevice, seen: None) -> None:
    occupant = shared.take("10%")
    occupant.child.ask(START)
    until(lambda: activity(shared, occupant).working is False)
    occupant.child.ask(COMPUTE)
    until(lambda: activity(shared, occupant).working is True)
    occupant.child.ask("stop.set(); worker.join()")
    until(lambda: activity(shared, occupant).working is False, within=60)


def test_an_unused_slice_is_lent_and_comes_back_on_the_same_device(shared: SharedDevice) -> None:
    occupant = shared.take("10%")
    occupant.child.ask("import torch")
    assert run(shared.pool.park(occupant.lease.id)).state is LeaseState.PARKED
    back = run(shared.pool.resume(occupant.lease.id))
    assert back.state is LeaseState.HELD
    assert [part.device for part in back.slices] == [part.device for part in occupant.lease.slices]
    assert occupant.child.ask(f"{START}\nanswer = torch.cuda.is_initialized()") is True


def test_a_slice_is_not_lent_once_its_process_has_initialised_cuda(shared: SharedDevice) -> None:
    occupant = shared.take("10%")
    occupant.child.ask(START)
    with pytest.raises(NotAllowed, match="initialised CUDA"):
        run(shared.pool.park(occupant.lease.id))
    assert run(shared.pool.get_lease(occupant.lease.id)).state is LeaseState.HELD
