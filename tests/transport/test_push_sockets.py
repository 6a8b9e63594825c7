"""The engine's PUSH sockets, with libzmq and with worse at the other end."""

import contextlib
import functools
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq
from sparksched import _core

from testkit.server import reserved_port

pytestmark = pytest.mark.timeout(180)

PATIENCE_S = 60.0

GREETING = bytes([0xFF, *[0] * 8, 0x7F, 3, 1]) + b"NULL".ljust(20, b"\0") + bytes(32)
READY = b"\x04\x1a\x05READY\x0bSocket-Type\0\0\0\x04PULL"
THEIR_READY = READY.replace(b"PULL", b"PUSH")


class Waiting:
    """Sockets to some addresses, and the thread that waits for what happens to them."""

    def __init__(self, *addresses: str, idle: int = 1 << 20, most: int = 1 << 24) -> None:
        self.sockets = _core.EngineSockets(
            list(addresses),
            max_idle_backlog_bytes=idle,
            max_backlog_bytes=most,
            stuck_after_s=0.0,
        )
        self.events: list[tuple[int, str | None]] = []
        self._thread = threading.Thread(target=self._wait, daemon=True)
        self._thread.start()

    def _wait(self) -> None:
        while events := self.sockets.wait():
            self.events += events

    def send(self, *frames: bytes, regardless: bool = False) -> bool:
        return self.sockets.send(0, 0, frames, regardless=regardless)

    def end(self) -> None:
        self.sockets.close()
        self._thread.join(PATIENCE_S)
        assert not self._thread.is_alive()


@contextlib.contextmanager
def waiting(*addresses: str, **limits: int) -> Iterator[Waiting]:
    it = Waiting(*addresses, **limits)
    try:
        yield it
    finally:
        it.end()


@contextlib.contextmanager
def pulling(address: str, *, high_water_mark: int = 1) -> Iterator["zmq.Socket[bytes]"]:
    with zmq.Context() as context, context.socket(zmq.PULL) as pull:
        pull.setsockopt(zmq.RCVTIMEO, int(1000 * PATIENCE_S))
        pull.setsockopt(zmq.RCVHWM, high_water_mark)
        pull.setsockopt(zmq.RCVBUF, 4096)
        pull.bind(address)
        yield pull


def until(condition: Callable[[], Any]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.002)


@pytest.fixture(params=["ipc", "tcp"])
def address(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    if request.param == "ipc":
        yield f"ipc://{tmp_path}/out"
        return
    with reserved_port() as port:
        yield f"tcp://127.0.0.1:{port}"


SIZES = [0, 1, 254, 255, 256, 257, 65_535, 65_536, 5_000_000]


def test_messages_of_any_size_arrive_in_order(address: str) -> None:
    messages = [[bytes([size % 251]) * size] for size in SIZES]
    messages += [[b"head", *map(bytes, SIZES[:-1])], [bytes(3)] * 1000]
    with waiting(address, idle=1 << 30, most=1 << 30) as it:
        for message in messages:  # nobody listens yet
            assert it.send(*message)
        with pulling(address) as pull:
            for message in messages:
                assert pull.recv_multipart() == message
            until(lambda: not it.sockets.backlog_bytes(0))
            for message in messages:
                assert it.send(*message)
                assert pull.recv_multipart() == message
        until(lambda: it.events)
        assert it.events[0] == (0, None)


def test_a_peer_that_ends_is_reported_and_gets_nothing_more(address: str) -> None:
    with waiting(address) as it:
        with pulling(address) as pull:
            it.send(b"first")
            assert pull.recv() == b"first"
        until(lambda: it.sockets.is_deserted)
        # Who waits hears of it a moment later.
        until(lambda: any(reason for _, reason in it.events))
        assert [client for client, reason in it.events if reason] == [0]
        assert it.send(bytes(1 << 20))
        assert it.sockets.backlog_bytes(0) == 0


def test_what_waits_is_bounded_and_has_no_gap_when_the_peer_reads_again(address: str) -> None:
    with pulling(address) as pull, waiting(address, idle=100_000, most=100_000) as it:
        until(lambda: it.events)
        sent = 0
        while it.send(b"%08d" % sent, bytes(10_000)):
            sent += 1
            assert sent < 10_000
        assert 100_000 <= it.sockets.backlog_bytes(0) < 200_000
        # Nothing overtakes what was refused, though the peer has made room.
        first = int(pull.recv_multipart()[0])
        assert not it.send(b"late")
        assert it.send(b"error", regardless=True)
        lost = 0
        while taken := it.sockets.take_back_newest(0, max_bytes=30_000):
            lost += len(taken)
        it.sockets.unblock(0)
        assert it.send(b"after")
        rest = [int(pull.recv_multipart()[0]) for _ in range(sent - lost - 1)]
        assert [first, *rest] == list(range(sent - lost))
        assert [pull.recv(), pull.recv()] == [b"error", b"after"]
        assert lost


def test_a_front_end_takes_what_it_does_not_read(address: str) -> None:
    """Python front ends of vLLM have no high-water mark: what they don't read waits in them."""
    with (
        pulling(address, high_water_mark=0) as pull,
        waiting(address, idle=100_000, most=100_000) as it,
    ):
        until(lambda: it.events)
        for number in range(800):
            until(lambda: it.sockets.backlog_bytes(0) < 100_000)
            assert it.send(b"%08d" % number, bytes(100_000))
        until(lambda: not it.sockets.backlog_bytes(0))
        for number in range(800):
            assert int(pull.recv_multipart()[0]) == number


@contextlib.contextmanager
def listening(path: Path) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.settimeout(PATIENCE_S)
        listener.bind(str(path))
        listener.listen()
        yield listener


def accepted(listener: socket.socket) -> socket.socket:
    peer, _ = listener.accept()
    peer.settimeout(PATIENCE_S)
    return peer


def received(peer: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size and (some := peer.recv(size - len(data))):
        data += some
    return data


def test_pieces_and_pings_are_understood(tmp_path: Path) -> None:
    with listening(tmp_path / "out") as listener, waiting(f"ipc://{tmp_path}/out") as it:
        it.send(b"a", b"b")
        with accepted(listener) as peer:
            assert received(peer, 64 + len(THEIR_READY)) == GREETING + THEIR_READY
            for byte in GREETING + READY:
                assert not it.events
                peer.send(bytes([byte]))
            assert received(peer, 6) == b"\x01\x01a\x00\x01b"
            peer.send(b"\x04\x0a\x04PING\0\x05abc")
            assert received(peer, 10) == b"\x04\x08\x04PONGabc"
            # In the midst of a message there is no answer.
            message = bytes(1 << 22)
            it.send(message)
            peer.send(b"\x04\x07\x04PING\0\x05")
            assert received(peer, 9 + len(message))[9:] == message
            assert received(peer, 7) == b"\x04\x05\x04PONG"


def test_until_a_peer_has_shaken_hands_others_may_come(tmp_path: Path) -> None:
    with listening(tmp_path / "out") as listener, waiting(f"ipc://{tmp_path}/out") as it:
        it.send(b"x")
        for said in (b"", GREETING[:40], GREETING):
            with accepted(listener) as peer:
                peer.send(said)
        with accepted(listener) as peer:
            peer.send(GREETING + READY)
            assert received(peer, 64 + len(THEIR_READY) + 3)[-3:] == b"\x00\x01x"
        until(lambda: it.sockets.is_deserted and it.events)
        assert it.events[0] == (0, None)


def test_one_peer_does_not_concern_another(tmp_path: Path) -> None:
    addresses = [f"ipc://{tmp_path}/a", f"ipc://{tmp_path}/b"]
    with pulling(addresses[0]) as first, waiting(*addresses, idle=1000, most=1000) as it:
        while it.sockets.send(1, 0, [bytes(100)]):
            pass
        assert it.send(b"first")
        assert first.recv() == b"first"
        assert not it.sockets.is_deserted


def descriptors() -> set[tuple[str, str]]:
    """Return what is open in this process: numbers, and what they lead to."""
    found = set()
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # the directory's own
            found.add((number, os.readlink(f"/proc/self/fd/{number}")))
    return found


def test_no_descriptors_stay(address: str) -> None:
    before = descriptors()
    it = Waiting(address)
    with pulling(address):
        until(functools.partial(bool, it.events))
    it.end()
    del it
    until(lambda: descriptors() <= before)
