"""``list``, ``status`` and ``smi``: tables for people, and JSON whose shape programs rely on."""

from __future__ import annotations

import json
import signal

DEVICE = {
    "uuid", "index", "model", "memory_mib", "contexts", "driver", "mig_profile", "numa_node", "nvlink",
    "one_size", "simulated", "drained", "drained_at", "hibernates", "milli", "held_milli", "free_milli",
    "held_memory_mib", "free_memory_mib", "held_contexts", "free_contexts", "held_by", "node", "unbounded",
    "context_mib", "fault", "exclusive", "unified", "cuda_index",
}  # fmt: skip
LEASE = {
    "id", "request", "state", "position", "place", "user", "course", "kernel", "batch", "requested_at",
    "held_at", "ended_at",
    "end_reason", "pid", "slices", "enforcement", "ends_at", "job", "job_ends_at", "simulated",
    "failure",
}  # fmt: skip


def test_the_list_shows_what_is_free(terminal):
    terminal.hold("2%")
    done = terminal.run("list")
    assert (done.returncode, done.stderr) == (0, "")
    heading, row = done.stdout.splitlines()
    assert heading.split()[:2] == ["GPU", "Model"]
    assert "V100-SXM2-32GB (simulated)  98% of 100%" in row
    assert "\x1b" not in done.stdout


def test_details_show_who_holds_what(terminal):
    assert "Nothing is held." in terminal.run("list", "-d").stdout
    lease_id = terminal.hold("2%")
    held = terminal.run("list", "-d").stdout.splitlines()[-1]
    assert held.split()[:4] == ["0", "2%", "655MiB", "somebody"]
    assert held.rstrip().endswith(lease_id)


def test_the_list_as_json(terminal):
    lease_id = terminal.hold("2%")
    printed = json.loads(terminal.run("list", "--json").stdout)
    assert set(printed) == {"url", "simulated", "note", "devices"}
    (device,) = printed["devices"]
    assert set(device) == DEVICE
    assert (device["held_milli"], device["free_milli"], device["simulated"]) == (20, 980, True)
    assert device["held_by"] == [
        {
            "lease": lease_id,
            "user": "somebody",
            "kernel": None,
            "milli": 20,
            "memory_mib": 655,
            "contexts": 0,
        }
    ]


def test_the_status_shows_leases_and_the_line(terminal):
    terminal.hold("100%")
    waiting = terminal.hold("2%")
    held_row, waiting_row = terminal.run("status").stdout.splitlines()[1:]
    assert held_row.split()[:3] == ["held", "1", "0"]
    assert "(simulated)" in held_row
    assert "  none, none  " in held_row
    assert waiting_row.startswith("1st in the queue")
    assert waiting_row.rstrip().endswith(waiting)


def test_the_status_as_json(terminal):
    held, waiting = terminal.hold("100%"), terminal.hold("2%")
    printed = json.loads(terminal.run("status", "--json").stdout)
    assert set(printed) == {"url", "simulated", "note", "devices", "leases", "queue", "asleep"}
    (lease,), (waiter,) = printed["leases"], printed["queue"]
    assert set(lease) == set(waiter) == LEASE
    assert (lease["id"], lease["state"], lease["slices"][0]["milli"]) == (held, "held", 1000)
    assert (waiter["id"], waiter["state"], waiter["position"], waiter["slices"]) == (
        waiting,
        "waiting",
        1,
        [],
    )


def test_watching_as_json_prints_a_line_for_each_change(terminal):
    program = terminal.start("status", "--watch", "--json")
    assert json.loads(program.stdout.readline())["leases"] == []
    lease_id = terminal.hold("2%")
    assert [lease["id"] for lease in json.loads(program.stdout.readline())["leases"]] == [lease_id]
    program.send_signal(signal.SIGINT)
    assert (program.wait(60), program.stderr.read()) == (0, "")


def test_my_slice_from_within_it(terminal):
    done = terminal.run("run", "-q", "2%", "--", "gpu-pool", "smi")
    lines = dict(line.split(":", 1) for line in done.stdout.splitlines())
    assert lines["Slice"].strip() == "2% of V100-SXM2-32GB (simulated), 655MiB"
    assert lines["GPU"].strip().endswith("655MiB granted, use not known")
    assert {"Memory limit", "Compute limit", "Held for", "Lease"} <= set(lines)


def test_my_slice_is_known_by_the_environment_where_ancestors_are_not(terminal):
    lease_id = terminal.hold("2%")
    printed = terminal.run("smi", "--json", env={"GPU_POOL_LEASE": lease_id}).stdout
    (lease,) = json.loads(printed)["leases"]
    assert set(lease) == LEASE
    assert (lease["id"], lease["slices"][0]["memory_used_mib"]) == (lease_id, None)


def test_a_reader_that_leaves_is_no_error(terminal):
    done = terminal.call("bash", "-c", "gpu-pool list | head -n 0; gpu-pool status --json | head -n 0")
    assert (done.stdout, done.stderr) == ("", "")


def test_it_is_a_subcommand_of_jupyter(terminal):
    done = terminal.call("jupyter", "gpu-pool", "list")
    assert (done.returncode, done.stderr) == (0, "")
    assert "(simulated)" in done.stdout
