"""A child for the tests of child processes: `python -m child_program CHANNEL PARENT` does what its channel says.

With ASYNCRL_TEST_UNTIED it does not ask the kernel to end it with its parent.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

from asyncrl.concurrency.channel import Channel
from asyncrl.concurrency.child import die_with_parent


async def serve(channel: Channel) -> None:
    while True:
        try:
            message = await channel.receive()
        except EOFError:
            return
        if "say" in message:
            os.write(message.get("to", 1), message["say"].encode("latin-1"))
        if "start" in message:  # a process of ours, which knows nothing of us and of the node
            channel.send({"started": start()})
        if "exit" in message:
            channel.send({"last": "words"})
            await channel.drain()
            sys.exit(message["exit"])
        if "stick" in message:
            channel.send({"stuck": True})
            await channel.drain()
            stick()
        if "write" in message:  # past the protocol
            os.write(channel._socket.fileno(), message["write"].encode())
        if "echo" in message:
            channel.send({"echo": message["echo"], **about_us(message.get("read"))})


def start() -> int:
    return subprocess.Popen(["sleep", "600"]).pid


def stick() -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    while True:
        time.sleep(600)


def about_us(descriptor: int | None) -> dict[str, Any]:
    return {
        "arguments": sys.argv[1:],
        "environment": os.environ.get("ASYNCRL_TEST"),
        "group": os.getpgid(0),
        "session": os.getsid(0),
        "stdin": sys.stdin.read(),
        "inherited": "" if descriptor is None else os.read(descriptor, 100).decode(),
        "open": dict(open_descriptors()),
    }


def open_descriptors() -> Iterator[tuple[str, str]]:
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # the one with which we look
            yield number, os.readlink(f"/proc/self/fd/{number}")


async def main() -> None:
    await serve(Channel(socket.socket(fileno=int(sys.argv[1])), "the parent"))


if __name__ == "__main__":
    if "ASYNCRL_TEST_UNTIED" not in os.environ:
        die_with_parent(int(sys.argv[2]))
    asyncio.run(main())
