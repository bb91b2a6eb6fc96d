"""The sentinel's truth table: one test a row, and the looks that the rows start from."""

from __future__ import annotations

import errno
import socket
import struct

import pytest

from trio_infer import DisconnectPolicy
from trio_infer.wire.sights import ROWS, Action, Sight, verdict
from trio_infer.wire.transport import peek

POLICIES = [
    DisconnectPolicy(half_close=half_close, pipelined=pipelined)
    for half_close in ("gone", "wait")
    for pipelined in ("disarm", "watch")
]


@pytest.mark.parametrize("policy", POLICIES, ids=str)
def test_nothing_to_read_keeps_waiting_whatever_the_policy(policy: DisconnectPolicy) -> None:
    assert verdict(Sight.QUIET, policy) is Action.WAIT


@pytest.mark.parametrize("policy", POLICIES, ids=str)
def test_a_reset_cancels_whatever_the_policy(policy: DisconnectPolicy) -> None:
    assert verdict(Sight.RESET, policy) is Action.CANCEL


@pytest.mark.parametrize("policy", POLICIES, ids=str)
def test_an_end_of_stream_cancels_unless_half_closed_clients_are_waited_for(policy: DisconnectPolicy) -> None:
    expected = Action.CANCEL if policy.half_close == "gone" else Action.WATCH_RESET
    assert verdict(Sight.EOF, policy) is expected


@pytest.mark.parametrize("policy", POLICIES, ids=str)
def test_pipelined_bytes_disarm_or_are_slept_through(policy: DisconnectPolicy) -> None:
    expected = {
        ("gone", "disarm"): Action.DISARM,
        ("wait", "disarm"): Action.DISARM,
        ("gone", "watch"): Action.WATCH_HANGUP,
        ("wait", "watch"): Action.WATCH_RESET,
    }[policy.half_close, policy.pipelined]
    assert verdict(Sight.DATA, policy) is expected


def test_each_sight_has_one_row_for_each_policy() -> None:
    for sight in Sight:
        for policy in POLICIES:
            rows = [
                row
                for row in ROWS
                if row[0] is sight and row[1] in ("*", policy.half_close) and row[2] in ("*", policy.pipelined)
            ]
            assert len(rows) == 1, (sight, policy)


def test_the_default_policy_is_to_cancel_at_a_fin_and_to_be_disarmed_by_bytes() -> None:
    assert DisconnectPolicy() == DisconnectPolicy(on_disconnect="cancel", half_close="gone", pipelined="disarm")


class FakeSocket:
    """A socket whose `recv` does what the kernel would."""

    def __init__(self, result: bytes | OSError) -> None:
        self._result = result

    def recv(self, size: int, flags: int) -> bytes:
        assert (size, flags) == (1, socket.MSG_PEEK)
        if isinstance(self._result, OSError):
            raise self._result
        return self._result


@pytest.mark.parametrize(
    ("result", "sight"),
    [
        (b"", Sight.EOF),
        (b"P", Sight.DATA),
        (BlockingIOError(errno.EAGAIN, "again"), Sight.QUIET),
        (BlockingIOError(errno.EWOULDBLOCK, "would block"), Sight.QUIET),
        (InterruptedError(errno.EINTR, "interrupted"), Sight.QUIET),
        (ConnectionResetError(errno.ECONNRESET, "reset"), Sight.RESET),
        (TimeoutError(errno.ETIMEDOUT, "keepalive gave up"), Sight.RESET),
        (BrokenPipeError(errno.EPIPE, "broken pipe"), Sight.RESET),
        (OSError(errno.EHOSTUNREACH, "no route"), Sight.RESET),
    ],
    ids=lambda value: errno.errorcode[value.errno] if isinstance(value, OSError) else str(value),
)
def test_what_a_peek_says(result: bytes | OSError, sight: Sight) -> None:
    assert peek(FakeSocket(result)) is sight  # type: ignore[arg-type]


def test_what_a_peek_says_of_real_sockets() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def pair() -> tuple[socket.socket, socket.socket]:
            client = socket.create_connection(listener.getsockname())
            server, _ = listener.accept()
            server.setblocking(False)
            return client, server

        client, server = pair()
        assert peek(server) is Sight.QUIET
        client.send(b"GET")
        assert peek(server) is Sight.DATA
        assert server.recv(10) == b"GET", "a look takes nothing"
        client.shutdown(socket.SHUT_WR)
        assert peek(server) is Sight.EOF
        client.close()
        server.close()

        client, server = pair()
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        client.close()
        assert peek(server) is Sight.RESET
        server.close()
