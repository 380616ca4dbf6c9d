"""What is ZeroMQ's alone: where it listens, whom it locks out, and that it leaves nothing behind."""

import asyncio
import os
import socket
from pathlib import Path

import msgpack
import pytest
import zmq

from forebay.transport.addresses import RefusedAddress, check_endpoint, check_http_host, runtime_folder
from forebay.transport.codec import Reader, UnreadableFrame, encode, read_to_scheduler
from forebay.transport.messages import Abort, Query, Sampling, Submit, ToScheduler
from forebay.transport.zeromq import AddressInUse, ZmqHub, ZmqLink


def hub(endpoint: str) -> ZmqHub[Query, ToScheduler]:
    return ZmqHub(endpoint, read_to_scheduler(), lambda peer, messages: None, lambda peer, error: None)


async def test_a_second_hub_at_an_address_is_refused_and_the_first_keeps_it(tmp_path: Path) -> None:
    endpoint = f"ipc://{tmp_path}/hub"
    first = hub(endpoint)
    with pytest.raises(AddressInUse, match="another process listens at"):
        hub(endpoint)
    assert (tmp_path / "hub").is_socket()
    first.close()
    hub(endpoint).close()


async def test_a_taken_tcp_port_is_refused() -> None:
    first = hub("tcp://127.0.0.1:*")
    with pytest.raises(AddressInUse, match="cannot listen at tcp"):
        hub(first.endpoint)
    first.close()


def plant(path: Path, kind: str) -> None:
    match kind:
        case "file":
            path.write_text("precious")
        case "folder":
            path.mkdir()
        case "link":
            path.symlink_to(path.with_name("elsewhere"))
        case _:
            os.mkfifo(path)


@pytest.mark.parametrize("kind", ["file", "folder", "link", "special file"])
async def test_what_is_no_socket_is_refused_and_stays(tmp_path: Path, kind: str) -> None:
    """ZeroMQ alone deletes a file at the address that it is given."""
    path = tmp_path / "hub"
    plant(path, kind)
    before = path.lstat()
    with pytest.raises(RefusedAddress, match=f"hub is refused: there is a {kind}, no socket") as refused:
        hub(f"ipc://{path}")
    assert str(path) in str(refused.value)
    assert path.lstat() == before
    assert os.listdir(tmp_path) == ["hub"]


@pytest.mark.parametrize("kind", ["file", "folder", "link", "special file"])
async def test_nor_is_anything_taken_for_a_lock_that_is_none(tmp_path: Path, kind: str) -> None:
    lock = tmp_path / "hub.lock"
    plant(lock, kind)
    before = lock.lstat()
    with pytest.raises(RefusedAddress, match=r"hub\.lock"):
        hub(f"ipc://{tmp_path}/hub")
    assert lock.lstat() == before
    assert os.listdir(tmp_path) == ["hub.lock"]


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("/no/such/folder/hub", "folder /no/such/folder: No such file or directory; make it"),
        ("/dev/null/hub", "/dev/null is no folder"),
        ("/proc/hub", "/proc"),
        ("/dev/null/x/hub", "Not a directory"),
    ],
)
async def test_a_place_where_no_socket_can_be_is_refused(path: str, words: str) -> None:
    with pytest.raises(RefusedAddress, match=words):
        hub(f"ipc://{path}")


async def test_a_socket_of_another_program_is_not_taken_over(tmp_path: Path) -> None:
    path = tmp_path / "hub"
    for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM):
        with socket.socket(socket.AF_UNIX, kind) as other:
            other.bind(str(path))
            if kind == socket.SOCK_STREAM:
                other.listen(1)
            with pytest.raises(AddressInUse, match="another program listens at"):
                hub(f"ipc://{path}")
            assert os.listdir(tmp_path) == ["hub"]
        path.unlink()


async def test_what_a_killed_process_left_is_taken_over_and_nothing_is_left(tmp_path: Path) -> None:
    path = tmp_path / "hub"
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as dead:
        dead.bind(str(path))
    (tmp_path / "hub.lock").touch()
    made = hub(f"ipc://{path}")
    assert path.is_socket()
    made.close()
    assert os.listdir(tmp_path) == []


async def test_only_the_owner_may_connect(tmp_path: Path) -> None:
    made = hub(f"ipc://{tmp_path}/hub")
    assert (tmp_path / "hub").stat().st_mode & 0o777 == 0o600
    made.close()


async def test_opening_and_closing_leaves_no_descriptor(tmp_path: Path) -> None:
    async def once() -> None:
        made = hub(f"ipc://{tmp_path}/hub")
        link: ZmqLink[Query, ToScheduler] = ZmqLink(
            made.endpoint, "a", read_to_scheduler(), lambda messages: None, lambda peer, error: None
        )
        link.send(Query(1))
        link.close()
        made.close()

    await once()
    # ZeroMQ closes sockets in a thread of its own: wait until the count stands still at where it was.
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(30):
        await once()
    async with asyncio.timeout(10):
        while len(os.listdir("/proc/self/fd")) > before:
            await asyncio.get_running_loop().run_in_executor(None, os.sched_yield)


@pytest.mark.parametrize(
    "endpoint",
    [
        "tcp://0.0.0.0:1",
        "tcp://[::1]:5",
        "tcp://127.0.0.1",
        "tcp://127.0.0.1x:1",
        "tcp://*:5555",
        "tcp://192.168.1.2:1",
        "tcp://host:1",
        "udp://127.0.0.1:1",
        "x",
        "",
    ],
)
def test_listening_beyond_ipc_and_loopback_is_refused(endpoint: str) -> None:
    with pytest.raises(RefusedAddress, match="allowed are ipc:///absolute/path and tcp:// on loopback"):
        check_endpoint(endpoint)


@pytest.mark.parametrize(
    "endpoint", ["ipc:///tmp/x", "tcp://127.0.0.1:*", "tcp://127.0.0.2:65535", "tcp://localhost:0"]
)
def test_ipc_and_loopback_are_allowed(endpoint: str) -> None:
    assert check_endpoint(endpoint) == endpoint


@pytest.mark.parametrize("port", ["65536", "99999999999", "-1", "+5", "0x10", "5 ", "", "\N{ARABIC-INDIC DIGIT TWO}"])
def test_a_port_that_is_none_is_refused(port: str) -> None:
    with pytest.raises(RefusedAddress, match="is no port; allowed are 0 to 65535"):
        check_endpoint(f"tcp://127.0.0.1:{port}")


@pytest.mark.parametrize("endpoint", ["ipc:///a\0b", "ipc:///a\nb", "ipc:///\ud800", "tcp://127.0.0.1:5\n"])
def test_characters_that_no_address_has_are_refused(endpoint: str) -> None:
    with pytest.raises(RefusedAddress, match="cannot be printed"):
        check_endpoint(endpoint)


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.2", "::1", "localhost"])
def test_http_on_loopback_is_allowed(host: str) -> None:
    assert check_http_host(host) == host


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.1", "example", "", "[::1]", "::1%lo", "127.0.0.1\n"])
def test_http_beyond_loopback_is_refused(host: str) -> None:
    with pytest.raises(RefusedAddress, match="only loopback is allowed"):
        check_http_host(host)


def test_http_beyond_loopback_is_allowed_where_requests_need_a_token() -> None:
    for host in ("0.0.0.0", "::", "10.0.0.1"):
        assert check_http_host(host, authenticated=True) == host
    with pytest.raises(RefusedAddress, match="it is no address"):
        check_http_host("example", authenticated=True)


def test_a_socket_path_that_does_not_fit_is_refused_with_both_lengths() -> None:
    with pytest.raises(RefusedAddress, match="at most 107 bytes, this one 121"):
        check_endpoint("ipc:///" + "x" * 120)


def test_a_runtime_folder_that_others_can_enter_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    assert runtime_folder().stat().st_mode & 0o777 == 0o700
    runtime_folder().chmod(0o755)
    with pytest.raises(PermissionError, match="remove it, or set XDG_RUNTIME_DIR"):
        runtime_folder()


@pytest.mark.parametrize("base", ["relative", "/dev/null", "/dev/null/x", "/proc/x"])
def test_a_runtime_folder_that_cannot_be_is_refused_by_its_variables_name(
    base: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", base)
    with pytest.raises(RefusedAddress, match="XDG_RUNTIME_DIR") as refused:
        runtime_folder()
    assert base in str(refused.value)


SUBMIT = Submit(7, 1, "llm-0", b"\x01\x00\x00\x00", 1, Sampling(16, 0.5, 0.9, 3, 2, True))


def test_any_msgpack_library_reads_our_bytes_and_writes_them() -> None:
    frame = encode([SUBMIT, Abort(9)])
    fields = ["Submit", 7, 1, "llm-0", b"\x01\x00\x00\x00", 1, [16, 0.5, 0.9, 3, 2, True], ""]
    assert msgpack.unpackb(frame) == [fields, ["Abort", 9]]
    assert read_to_scheduler()(msgpack.packb([fields, ["Abort", 9]])) == [SUBMIT, Abort(9)]


def test_the_wire_is_what_it_was() -> None:
    assert encode([SUBMIT, Abort(9)]).hex() == (
        "9298a65375626d69740701a56c6c6d2d30c40401000000019610cb3fe0000000000000cb3feccccccccccccd0302c3a092a541626f727409"
    )


def test_a_message_of_an_older_peer_lacks_what_was_appended_since() -> None:
    before_tenants = bytes.fromhex(
        "9297a65375626d69740701a56c6c6d2d30c40401000000019610cb3fe0000000000000cb3feccccccccccccd0302c392a541626f727409"
    )
    assert read_to_scheduler()(before_tenants) == [SUBMIT, Abort(9)]


def test_a_field_that_a_newer_peer_appended_is_skipped() -> None:
    assert read_to_scheduler()(msgpack.packb([["Abort", 9, "new"]])) == [Abort(9)]


@pytest.mark.parametrize(
    "frame",
    [b"", b"\xc1", b"nonsense", *(msgpack.packb([m]) for m in (["Unknown", 1], ["Abort", "x"], ["Abort"]))],
)
def test_an_unreadable_frame_says_so(frame: bytes) -> None:
    with pytest.raises(UnreadableFrame, match="are no frame of protocol 1"):
        read_to_scheduler()(frame)


def test_a_reader_takes_only_its_own_union() -> None:
    reader: Reader[Abort] = Reader(Abort | Query)
    with pytest.raises(UnreadableFrame, match="Submit"):
        reader(encode([SUBMIT]))


def test_zeromq_is_recent_enough() -> None:
    assert zmq.zmq_version_info() >= (4, 3)
