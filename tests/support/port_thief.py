"""Another user of the machine who listens where others want to.

Run by path with the id of that user, the number of a descriptor, an address and ports: it listens at each it
can, says ``ready`` and how many it got on the descriptor, and writes there whatever it is sent.
"""

from __future__ import annotations

import os
import selectors
import socket
import sys


def main(user: int, descriptor: int, ip: str, ports: list[int]) -> None:
    """Take the ports, and listen for ever."""
    os.setgroups([])
    os.setgid(user)
    os.setuid(user)
    selector = selectors.DefaultSelector()
    got = 0
    for port in ports:
        taken = socket.socket()
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            taken.bind((ip, port))
            taken.listen()
        except OSError:
            continue
        selector.register(taken, selectors.EVENT_READ)
        got += 1
    os.write(descriptor, f"ready {got}\n".encode())
    while got:
        for key, _ in selector.select():
            if not isinstance(key.fileobj, socket.socket):
                continue
            if key.data is None:
                connection, _ = key.fileobj.accept()
                # As ZeroMQ greets (23/ZMTP), so that whoever connects goes on.
                connection.sendall(b"\xff" + bytes(8) + b"\x7f\x03\x00NULL" + bytes(48))
                selector.register(connection, selectors.EVENT_READ, "connection")
            elif heard := key.fileobj.recv(65536):
                os.write(descriptor, b"heard " + repr(heard).encode() + b"\n")
            else:
                selector.unregister(key.fileobj)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], [int(port) for port in sys.argv[4:]])
