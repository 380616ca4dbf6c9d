"""Where we may listen: Unix sockets and loopback, nothing else. There is no encryption on these channels."""

import ipaddress
import os
import re
import socket
import stat
import tempfile
from pathlib import Path

LONGEST_IPC_PATH = 107
"""Bytes that fit a Unix socket's address on Linux (sun_path, with its final zero)."""

LAST_PORT = 65535


class RefusedAddress(ValueError):
    """An address at which nothing of ours listens; says what is allowed."""


def check_http_host(host: str, authenticated: bool = False) -> str:
    """The host itself, if HTTP may listen there: on loopback, or anywhere if requests need a token."""
    if host != "localhost":
        try:
            address = ipaddress.ip_address(host)
        except ValueError:
            address = None
        no_address = address is None or "%" in host
        if authenticated and no_address:
            raise RefusedAddress(f"HTTP on {host!r} is refused: it is no address (127.0.0.1, 0.0.0.0, ::, localhost)")
        if not authenticated and (address is None or no_address or not address.is_loopback):
            raise RefusedAddress(
                f"HTTP on {host!r} is refused: requests are not authenticated, so only loopback is allowed "
                "(127.0.0.1, ::1, localhost); set http.token to listen elsewhere, and put a proxy with TLS in front"
            )
    return host


def check_endpoint(endpoint: str) -> str:
    """The endpoint itself, if a channel may listen there: `ipc://PATH`, or `tcp://HOST:PORT` on loopback, where a port
    may be `*`: any free one. Looks at the text alone."""
    scheme, _, rest = endpoint.partition("://")
    if not endpoint.isprintable():
        raise RefusedAddress(f"{endpoint!r} is refused: it holds characters that cannot be printed")
    if scheme == "ipc" and rest.startswith("/"):
        if len(rest.encode()) > LONGEST_IPC_PATH:
            raise RefusedAddress(
                f"{endpoint!r} is too long: a Unix socket's path has at most {LONGEST_IPC_PATH} bytes, "
                f"this one {len(rest.encode())}; a shorter XDG_RUNTIME_DIR helps"
            )
        return endpoint
    host, _, port = rest.rpartition(":")
    if scheme == "tcp" and _is_loopback_v4(host):
        # ZeroMQ would take a larger number modulo 65,536.
        if port != "*" and (re.fullmatch("[0-9]{1,5}", port) is None or int(port) > LAST_PORT):
            raise RefusedAddress(
                f"{endpoint!r} is refused: {port!r} is no port; allowed are 0 to {LAST_PORT} (0 and *: any free one)"
            )
        return endpoint
    raise RefusedAddress(
        f"{endpoint!r} is refused: allowed are ipc:///absolute/path and tcp:// on loopback (tcp://127.0.0.1:PORT), "
        "because channels are neither authenticated nor encrypted"
    )


def _is_loopback_v4(host: str) -> bool:
    """ZeroMQ listens at IPv6 addresses only when told to, and nobody needs it on loopback."""
    try:
        return host == "localhost" or ipaddress.IPv4Address(host).is_loopback
    except ValueError:
        return False


def check_socket_path(path: Path) -> None:
    """Raises RefusedAddress unless a Unix socket can be made there: its folder is there and can be written, and the
    path is free or holds a socket. ZeroMQ would delete a file of any other kind without a word."""
    try:
        if not stat.S_ISDIR(path.parent.stat().st_mode):
            raise RefusedAddress(f"ipc://{path} is refused: {path.parent} is no folder")
        if not os.access(path.parent, os.W_OK | os.X_OK):
            raise RefusedAddress(f"ipc://{path} is refused: user {os.getuid()} cannot write to folder {path.parent}")
    except OSError as error:
        raise RefusedAddress(
            f"ipc://{path} is refused: folder {path.parent}: {error.strerror}; make it, or name another path"
        ) from error
    try:
        status = path.lstat()
    except FileNotFoundError:
        return
    except OSError as error:
        raise RefusedAddress(f"ipc://{path} is refused: {error.strerror}") from error
    if not stat.S_ISSOCK(status.st_mode):
        kind = {stat.S_IFDIR: "a folder", stat.S_IFLNK: "a link", stat.S_IFREG: "a file"}
        raise RefusedAddress(
            f"ipc://{path} is refused: there is {kind.get(stat.S_IFMT(status.st_mode), 'a special file')}, no socket, "
            "and it would be deleted; move it away, or name another path"
        )


def is_answered(path: Path) -> bool:
    """Whether some process, ours or not, may still listen at a Unix socket's path."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)
        try:
            probe.connect(str(path))
        except (FileNotFoundError, ConnectionRefusedError):
            return False
        except OSError:
            return True  # busy, not for us, or of another kind: somebody holds it
        return True


def runtime_folder() -> Path:
    """A folder for sockets that only this user can enter. Raises RefusedAddress where none can be made, and
    PermissionError if somebody else made it."""
    base = os.environ.get("XDG_RUNTIME_DIR")
    if base and not base.startswith("/"):
        raise RefusedAddress(f"XDG_RUNTIME_DIR is {base!r}; it must be an absolute path")
    folder = Path(base, "forebay") if base else Path(tempfile.gettempdir(), f"forebay-{os.getuid()}")
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise RefusedAddress(
            f"{str(folder)!r} cannot be made for sockets: {error.strerror}; set XDG_RUNTIME_DIR to a folder of your own"
        ) from error
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o077:
        raise PermissionError(
            f"{folder} is not a folder that only user {os.getuid()} can enter "
            f"(owner {status.st_uid}, mode {stat.S_IMODE(status.st_mode):o}); remove it, or set XDG_RUNTIME_DIR"
        )
    return folder
