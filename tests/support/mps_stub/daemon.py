"""A stand-in for the daemon of nvidia-cuda-mps-control, for tests: real pipes, and no GPU.

``control.py`` runs it for the option -d. It lives in the folder
CUDA_MPS_PIPE_DIRECTORY, which it serves on the Unix socket ``control`` and
where it writes down its pid as the real one does; its servers are real processes.

Compared with the daemon of driver 580.159.04 on an H100 in November 2026, in how it shows limits (down
to whole GiB); not compared in the rest, which is written after NVIDIA's documents.

The file ``scenario.json`` beside it is read again for every question:

    refuse     {question: words}    these questions fail with these words
    hang       [question, ...]      these are never answered
    lie        [question, ...]      these are answered as if they were done, and are not
    die        [question, ...]      at these the daemon dies without an answer
    faulty     [server, ...]        these are in FAULT
    clients    {server: [pid, ...]} the clients of a server; "*" stands for any
    heals      question             once it was asked, none is
    stuck      [pid, ...]           clients that terminate_client does not get off
    no_daemon  "why"                -d fails with these words

A question is named by its first word, or by the first two for version 3.
Everything that it was asked is appended to ``asked.log`` beside it, a line each.
"""

# It starts often in the tests, and pathlib takes long to import:
# ruff: noqa: PTH103, PTH106, PTH107, PTH110, PTH120, SIM105, TRY301

import json
import os
import subprocess
import sys
import time
from socket import AF_UNIX, socket

PIPE = os.environ.get("CUDA_MPS_PIPE_DIRECTORY", "/tmp/nvidia-mps")
LOGS = os.environ.get("CUDA_MPS_LOG_DIRECTORY", "/tmp/nvidia-log")
HERE = os.path.dirname(sys.argv[0])
SOCKET, PID_FILE = f"{PIPE}/control", f"{PIPE}/nvidia-cuda-mps-control.pid"


def scenario():
    try:
        with open(f"{HERE}/scenario.json") as file:
            return json.load(file)
    except OSError:
        return {}


def note(line):
    with open(f"{HERE}/asked.log", "a") as file:
        file.write(line + "\n")


class Refused(Exception):
    pass


class Legacy:
    """Version 2: one server, and limits by default and by server."""

    def __init__(self):
        self.servers, self.percent, self.memory, self.asked = {}, 100, {}, set()

    def answer(self, words, lying):
        verb, *values = words
        self.asked.add(verb)
        return getattr(self, verb)(lying, *values)

    def get_default_active_thread_percentage(self, lying):
        return f"{float(self.percent)}"

    def set_default_active_thread_percentage(self, lying, value):
        self.percent = self.percent if lying else int(value)
        return f"{float(int(value))}"

    def get_default_device_pinned_mem_limit(self, lying, device):
        return self.memory.get(device, "")

    def set_default_device_pinned_mem_limit(self, lying, device, value):
        self.memory[device] = self.memory.get(device, "") if lying else shown(value)
        return ""

    def get_active_thread_percentage(self, lying, server):
        return f"{float(self.servers[server][1])}"

    def set_active_thread_percentage(self, lying, server, value):
        self.servers[server][1] = self.servers[server][1] if lying else int(value)
        return ""

    def get_device_pinned_mem_limit(self, lying, server, device):
        return self.servers[server][2].get(device, "")

    def set_device_pinned_mem_limit(self, lying, server, device, value):
        limits = self.servers[server][2]
        limits[device] = limits.get(device, "") if lying else shown(value)
        return ""

    def start_server(self, lying, _uid, uid):
        if not lying:
            process = start_server(uid)
            self.servers[f"{process.pid}"] = [process, self.percent, dict(self.memory)]
        return ""

    def get_server_list(self, lying):
        self.servers = {pid: known for pid, known in self.servers.items() if known[0].poll() is None}
        return "\n".join(self.servers)

    def get_server_status(self, lying, server):
        told = scenario()
        faulty = int(server) in told.get("faulty", []) and told.get("heals") not in self.asked
        return "FAULT" if faulty else "ACTIVE"

    def get_client_list(self, lying, server):
        return "\n".join(map(str, clients(server)))

    def terminate_client(self, lying, server, pid):
        if int(pid) in scenario().get("stuck", []):
            return "CUDA_ERROR_UNKNOWN"
        return "0"

    def stop(self):
        for process, *_ in self.servers.values():
            process.kill()
            process.wait()


class Named:
    """Version 3: named servers, each with namespaces."""

    def __init__(self):
        self.servers, self.spaces, self.gone = {}, {}, set()

    def answer(self, words, lying):
        module, verb, *values = words
        options = dict(word[2:].partition("=")[::2] for word in values if word.startswith("--"))
        plain = [word for word in values if not word.startswith("--")]
        return getattr(self, f"{module}_{verb}")(lying, options, *plain)

    def server_create(self, lying, options, name):
        if name in self.servers:
            raise Refused(f"server {name} exists")
        if not lying:
            self.servers[name] = start_server(options.get("uid", "-"))
        return ""

    def server_list(self, lying, options):
        rows = [f"{name},0,{process.pid},Ready,{PIPE}/{name},-,-" for name, process in self.servers.items()]
        return "\n".join(rows)

    def server_set(self, lying, options, name):
        self.spaces[name, "default"] = options
        return ""

    def namespace_create(self, lying, options, name):
        key = options["server"], name
        if key in self.spaces:
            raise Refused(f"namespace {name} exists")
        self.spaces[key] = {}
        os.makedirs(f"{PIPE}/{key[0]}/{name}")
        return ""

    def namespace_set(self, lying, options, name):
        if not lying:
            self.spaces[options["server"], name].update(options)
        return ""

    def namespace_get(self, lying, options, name, server, field):
        value = self.spaces[server, name].get(field, "")
        return f"{float(value):.2f}" if field == "active-thread-percentage" and value else value

    def namespace_list(self, lying, options):
        server = options["server"]
        return "\n".join(f"{name},{of},Ready,-,-,0,-" for of, name in self.spaces if of == server)

    def namespace_delete(self, lying, options, name):
        if self.spaces.pop((options["server"], name), None) is None:
            raise Refused(f"no namespace {name}")
        os.rmdir(f"{PIPE}/{options['server']}/{name}")
        return ""

    def client_list(self, lying, options):
        here = [pid for pid in clients(options["server"]) if pid not in self.gone]
        return "\n".join(f"{pid},{options['server']},0,x,python" for pid in here)

    def client_terminate(self, lying, options, pid):
        if int(pid) in scenario().get("stuck", []):
            return ""
        self.gone.add(int(pid))
        return ""

    def stop(self):
        for process in self.servers.values():
            process.kill()
            process.wait()


def shown(value):
    """Return a limit as it is shown: whole GiB as such."""
    mib = int(value[:-1])
    return f"{mib // 1024}G" if mib >= 1024 else value


def clients(server):
    told = scenario().get("clients", {})
    return told.get(server, told.get("*", []))


def start_server(uid):
    """Start a process that has a server's name, and lives until it is killed."""
    return subprocess.Popen([f"{HERE}/nvidia-cuda-mps-server", uid])


def serve(daemon):
    """Answer questions until told to quit."""
    listener = socket(AF_UNIX)
    listener.bind(SOCKET)
    listener.listen()
    with open(PID_FILE, "w") as file:
        file.write(f"{os.getpid()}\n")
    going_on = True
    while going_on:
        connection, _ = listener.accept()
        going_on = converse(daemon, connection)
        connection.close()


def converse(daemon, connection):
    """Answer one question; return whether to go on."""
    words = connection.recv(4096).decode().split()
    note(" ".join(words))
    told, names = scenario(), (words[0], " ".join(words[:2]))
    if any(name in told.get("die", []) for name in names):
        os.kill(os.getpid(), 9)
    if any(name in told.get("hang", []) for name in names):
        time.sleep(3600)
    if words[0] in ("quit", "-q"):
        daemon.stop()
        os.remove(PID_FILE)
        os.remove(SOCKET)
        connection.sendall(b"0")
        return False
    refused = next((told["refuse"][name] for name in names if name in told.get("refuse", {})), None)
    try:
        if refused:
            raise Refused(refused)
        lying = any(name in told.get("lie", []) for name in names)
        reply = f"0{daemon.answer(words, lying)}"
    except (Refused, AttributeError, KeyError, TypeError) as error:
        reply = f"1{error}"
    try:
        connection.sendall(reply.encode())
    except BrokenPipeError:  # the one who asked did not wait
        pass
    return True


def remove(path):
    if os.path.exists(path):
        os.remove(path)


def become_daemon():
    why = scenario().get("no_daemon")
    if why:
        sys.exit(why)
    os.makedirs(LOGS, exist_ok=True)
    remove(SOCKET)
    remove(PID_FILE)
    if os.fork():
        # The real one returns when it is ready to answer.
        while not os.path.exists(PID_FILE):
            time.sleep(0.005)
        os._exit(0)
    os.setsid()
    with open(os.devnull, "r+b") as nowhere, open(f"{LOGS}/control.log", "ab") as log:
        os.dup2(nowhere.fileno(), 0)
        os.dup2(nowhere.fileno(), 1)
        os.dup2(log.fileno(), 2)
    serve(Named() if "3" in sys.argv else Legacy())


become_daemon()
