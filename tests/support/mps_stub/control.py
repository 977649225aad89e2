"""A stand-in for nvidia-cuda-mps-control, for tests.

With the option -d it starts the daemon in ``daemon.py``. Otherwise it takes a
question, from its arguments or its standard input, to the daemon whose folder
is CUDA_MPS_PIPE_DIRECTORY, and prints the answer.
"""

# It starts a thousand times in the tests, so it imports and reads as little as it can.
import os
import sys
from _socket import AF_UNIX, socket

PIPE = os.environ.get("CUDA_MPS_PIPE_DIRECTORY", "/tmp/nvidia-mps")


def ask(words):
    connection = socket(AF_UNIX)
    try:
        connection.connect(f"{PIPE}/control")
    except OSError:
        sys.exit("Cannot find MPS control daemon process")
    connection.sendall(" ".join(words).encode())
    reply = connection.recv(4096).decode()
    if not reply:
        sys.exit("MPS control daemon ended")
    print(reply[1:])
    sys.exit(int(reply[0]))


if "-d" in sys.argv:
    with open(f"{os.path.dirname(sys.argv[0])}/daemon.py") as file:  # noqa: PTH120 - pathlib takes long
        exec(file.read())
else:
    told = sys.argv[1:] or sys.stdin.readline().split()
    ask(told[2:] if told[:2] == ["-p", "3"] else told)
