"""What the sdk gives plugin authors: views, readers, sockets, statuses and secrets."""

from __future__ import annotations

import ctypes
import errno
import io
import pickle
import shutil
import socket
import threading

import pytest

from lmcache_core import sdk
from lmcache_core.errors import (
    BackendError,
    BackendUnavailable,
    DeadlineExceeded,
    PermissionDenied,
)
from lmcache_core.sdk import Secret, Status, View, ViewReader, copy, cut, recv_into
from lmcache_core.storage.faults import status_for_errno, status_for_http, strip_traceback


def views_of(*pieces: bytes) -> list[View]:
    return [View(0, len(piece), memoryview(bytearray(piece))) for piece in pieces]


def content(views: list[View]) -> bytes:
    return b"".join(bytes(view.host or b"") for view in views)


class TimedCall:
    """A call with a time-out of its own for every wait."""

    deadline = 0.0
    cancelled = False

    def __init__(self, *remaining_s: float) -> None:
        self._remaining_s = list(remaining_s)

    def remaining(self) -> float:
        if not self._remaining_s:
            raise DeadlineExceeded("over")
        return self._remaining_s.pop(0)

    def done(self, index: int, outcome: object) -> None:
        raise AssertionError


def test_every_name_of_the_sdk_exists_once() -> None:
    assert len(set(sdk.__all__)) == len(sdk.__all__)
    for name in sdk.__all__:
        assert getattr(sdk, name) is not None


@pytest.mark.parametrize("offset", [0, 1, 4, 5, 9])
@pytest.mark.parametrize("nbytes", [0, 1, 3, 6])
def test_cut_takes_a_range_across_views(offset: int, nbytes: int) -> None:
    whole = b"abcd" + b"e" + b"fghijklmno"
    assert content(cut(views_of(b"abcd", b"e", b"fghijklmno"), offset, nbytes)) == whole[offset:][:nbytes]


@pytest.mark.parametrize(("offset", "nbytes"), [(-1, 1), (0, 16), (16, 0), (2, -1)])
def test_cut_refuses_a_range_outside(offset: int, nbytes: int) -> None:
    with pytest.raises(ValueError, match="is not inside 15 bytes"):
        cut(views_of(b"abcd", b"e", b"fghijklmno"), offset, nbytes)


def test_cut_keeps_addresses_devices_and_regions() -> None:
    (piece,) = cut([View(4096, 8192, None, device="cuda:1", region=3)], 100, 200)
    assert (piece.address, piece.nbytes, piece.device, piece.region) == (4196, 200, "cuda:1", 3)
    assert piece.host is None


def test_a_view_reader_reads_and_seeks_like_a_file() -> None:
    pieces = (b"abcd", b"", b"e", b"fghij")
    reader, oracle = ViewReader(views_of(*pieces)), io.BytesIO(b"".join(pieces))
    assert len(reader) == 10
    assert reader.readable()
    assert reader.seekable()
    for size in (3, 4, 0, 100, 1):
        assert reader.read(size) == oracle.read(size)
        assert reader.tell() == oracle.tell()
    for offset, whence in ((2, io.SEEK_SET), (3, io.SEEK_CUR), (-4, io.SEEK_END), (50, io.SEEK_SET)):
        assert reader.seek(offset, whence) == oracle.seek(offset, whence)
        assert reader.read() == oracle.read()
    with pytest.raises(ValueError, match="seek"):
        reader.seek(-1)
    reader.seek(0)
    copied = io.BytesIO()
    shutil.copyfileobj(reader, copied, 3)
    assert copied.getvalue() == oracle.getvalue()


def test_a_closed_view_reader_lets_go_of_the_memory() -> None:
    memory = bytearray(b"abcd")
    view = View(0, 4, memoryview(memory))
    with ViewReader([view]) as reader:
        assert reader.read(2) == b"ab"
        del view
    memory.append(1)  # would raise if it were still exported
    with pytest.raises(ValueError, match="closed"):
        reader.read(1)


def test_a_view_reader_refuses_memory_it_cannot_read() -> None:
    with pytest.raises(ValueError, match="host memory"):
        ViewReader([View(0, 4096, None, device="cuda:0")])


def test_recv_into_fills_a_view_however_the_bytes_come() -> None:
    here, there = socket.socketpair()
    with here, there:
        message = bytes(range(256)) * 512

        def send() -> None:
            for start in range(0, len(message), 5000):
                there.sendall(message[start : start + 5000])

        sender = threading.Thread(target=send)
        sender.start()
        (view,) = views_of(bytes(len(message)))
        recv_into(here, view, TimedCall(*[30.0] * 1000))
        sender.join()
        assert view.host == message


def test_recv_into_says_when_the_peer_went_away() -> None:
    here, there = socket.socketpair()
    with here:
        there.sendall(b"abc")
        there.close()
        with pytest.raises(BackendUnavailable, match="after 3 of 8 bytes"):
            recv_into(here, memoryview(bytearray(8)), TimedCall(30, 30, 30))


def test_recv_into_rearms_every_wait_and_ends_with_the_call() -> None:
    here, there = socket.socketpair()
    with here, there:
        there.sendall(b"abc")
        with pytest.raises(DeadlineExceeded):
            recv_into(here, memoryview(bytearray(8)), TimedCall(30))  # the second wait finds nothing left
        with pytest.raises(DeadlineExceeded, match="0 of 8 bytes"):
            recv_into(here, memoryview(bytearray(8)), TimedCall(0.001))


def test_copy_moves_bytes_between_addresses() -> None:
    source = ctypes.create_string_buffer(b"moved", 6)
    target = ctypes.create_string_buffer(6)
    copy(ctypes.addressof(target), ctypes.addressof(source), 6)
    assert target.value == b"moved"


def test_a_stripped_error_keeps_no_frame() -> None:
    try:
        try:
            raise KeyError("inner")
        except KeyError as cause:
            raise ValueError("outer") from cause
    except ValueError as caught:
        error = strip_traceback(caught)
    assert (error.__traceback__, error.__cause__, error.__context__) == (None, None, None)


@pytest.mark.parametrize(
    ("code", "op", "status"),
    [
        (errno.ENOENT, "get", Status.MISS),
        (errno.ENOENT, "put", Status.FAILED),
        (errno.ENOSPC, "put", Status.FULL),
        (errno.EDQUOT, "put", Status.FULL),
        (errno.ENOSPC, "get", Status.FAILED),
        (errno.EIO, "get", Status.FAILED),
    ],
)
def test_an_errno_has_its_status(code: int, op: str, status: Status) -> None:
    outcome = status_for_errno(code, op=op)
    assert outcome.status is status
    assert (outcome.error is not None) is (status is Status.FAILED)


@pytest.mark.parametrize(
    ("code", "kind", "retryable"),
    [
        (errno.EACCES, PermissionDenied, False),
        (errno.EROFS, PermissionDenied, False),
        (errno.ECONNRESET, BackendUnavailable, True),
        (errno.EMFILE, BackendUnavailable, True),
        (errno.EIO, BackendError, False),
        (9999, BackendError, False),
        (None, BackendError, False),
    ],
)
def test_an_errno_has_its_error(code: int | None, kind: type[BackendError], retryable: bool) -> None:
    error = status_for_errno(code).error
    assert type(error) is kind
    assert error.retryable is retryable
    assert error.args[0]


@pytest.mark.parametrize(
    ("code", "op", "status", "kind"),
    [
        (200, "put", Status.OK, None),
        (206, "get", Status.OK, None),
        (404, "get", Status.MISS, None),
        (416, "get", Status.MISS, None),
        (404, "put", Status.FAILED, BackendError),
        (507, "put", Status.FULL, None),
        (403, "get", Status.FAILED, PermissionDenied),
        (429, "get", Status.FAILED, BackendUnavailable),
        (503, "put", Status.FAILED, BackendUnavailable),
        (400, "put", Status.FAILED, BackendError),
        (301, "get", Status.FAILED, BackendError),
    ],
)
def test_an_http_status_has_its_outcome(
    code: int, op: str, status: Status, kind: type[BackendError] | None
) -> None:
    outcome = status_for_http(code, op=op)
    assert outcome.status is status
    assert (type(outcome.error) if outcome.error is not None else None) is kind


def test_a_secret_shows_itself_to_nobody_who_does_not_ask() -> None:
    secret = Secret("hunter2")
    assert secret.reveal() == "hunter2"
    for shown in (str(secret), repr(secret), f"{secret}", f"{[secret]}", f"{secret!s:>9}"):
        assert "hunter2" not in shown
    assert secret == Secret("hunter2")
    assert hash(secret) == hash(Secret("hunter2"))
    assert secret != Secret("hunter3")
    assert secret != "hunter2"
    assert not Secret("")
    assert pickle.loads(pickle.dumps(secret)) == secret


@pytest.mark.parametrize("value", [1234567, ["pass-word"], None, {"key": "pass-word"}], ids=repr)
def test_a_secret_of_another_type_is_refused_without_being_shown(value: object) -> None:
    with pytest.raises(ValueError) as caught:
        Secret.from_config(value)
    assert "pass-word" not in str(caught.value)
    assert "1234567" not in str(caught.value)
