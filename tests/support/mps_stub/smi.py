"""A stand-in for nvidia-smi, for tests: compute modes, processes and memory limits in a file.

The state stands beside the program, in ``nvidia-smi.json``: by uuid, ``mode``,
``apps`` (lines of pid and name), ``fixed`` (the mode may not be changed) and
``limits`` (soft and hard MiB, by control group). Every call is noted there.
Not compared with the program: written after its help and NVIDIA's documents.
"""

# It starts often in the tests, and pathlib takes long to import:
# ruff: noqa: PTH112, PTH118, PTH120

import json
import os
import sys

PATH = os.path.join(os.path.dirname(sys.argv[0]), "nvidia-smi.json")


def option(words, *names):
    return next(words[at + 1] for at, word in enumerate(words) if word in names)


def memory_limits(words, device):
    group, limits = option(words, "-n"), device.setdefault("limits", {})
    if not os.path.isdir(group):
        sys.exit("Unable to set memory limit: Not Found")
    if "--get" in words:
        soft, hard = limits.get(group, ["0", "max"])
        return f"namespace: {group}\nsoft limit: {soft} MiB\nhard limit: {hard} MiB\ncurrent used: 0 MiB"
    if not device.get("lies"):
        limits[group] = [option(words, "--soft-limit"), option(words, "--hard-limit")]
    return ""


def answer(words, state):
    if "--query-gpu=uuid" in words:
        return "\n".join(uuid for uuid in state if uuid.startswith("GPU-"))
    device = state[option(words, "-i")]
    if words[0] == "memory-limits":
        return memory_limits(words, device)
    if "--query-gpu=compute_mode" in words:
        return device["mode"]
    if "--query-compute-apps=pid,process_name" in words:
        return "\n".join(device.get("apps", []))
    if device.get("fixed"):
        sys.exit("Unable to set the compute mode for GPU: Insufficient Permissions")
    device["mode"] = {"EXCLUSIVE_PROCESS": "Exclusive_Process", "DEFAULT": "Default"}[option(words, "-c")]
    return "All done."


def main():
    with open(PATH) as file:
        state = json.load(file)
    words = sys.argv[1:]
    state["calls"].append(words)
    state["environ"] = dict(os.environ)
    text = answer(words, state)
    with open(PATH, "w") as file:
        json.dump(state, file)
    print(text)


main()
