"""Where we may listen: Unix sockets and loopback, nothing else. There is no encryption on these channels."""

import ipaddress
import os
import stat
import tempfile
from pathlib import Path

LONGEST_IPC_PATH = 107
"""Bytes that fit a Unix socket's address on Linux (sun_path, with its final zero)."""


class RefusedAddress(ValueError):
    """An address at which nothing of ours listens; says what is allowed."""


def is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def check_http_host(host: str) -> str:
    """The host itself, if HTTP may listen there."""
    if not is_loopback(host):
        raise RefusedAddress(
            f"HTTP on {host!r} is refused: requests are not authenticated, so only loopback is allowed "
            "(127.0.0.1, ::1, localhost); put a proxy in front to reach it from elsewhere"
        )
    return host


def check_endpoint(endpoint: str) -> str:
    """The endpoint itself, if a channel may listen there: `ipc://PATH`, or `tcp://HOST:PORT` on loopback."""
    scheme, _, rest = endpoint.partition("://")
    if scheme == "ipc" and rest.startswith("/"):
        if len(os.fsencode(rest)) > LONGEST_IPC_PATH:
            raise RefusedAddress(
                f"{endpoint!r} is too long: a Unix socket's path has at most {LONGEST_IPC_PATH} bytes, "
                f"this one {len(os.fsencode(rest))}; a shorter XDG_RUNTIME_DIR helps"
            )
        return endpoint
    if scheme == "tcp" and is_loopback(rest.rpartition(":")[0]):
        return endpoint
    raise RefusedAddress(
        f"{endpoint!r} is refused: allowed are ipc:///absolute/path and tcp:// on loopback (tcp://127.0.0.1:PORT), "
        "because channels are neither authenticated nor encrypted"
    )


def runtime_folder() -> Path:
    """A folder for sockets that only this user can enter. Raises PermissionError if somebody else made it."""
    base = os.environ.get("XDG_RUNTIME_DIR")
    folder = Path(base, "forebay") if base else Path(tempfile.gettempdir(), f"forebay-{os.getuid()}")
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o077:
        raise PermissionError(
            f"{folder} is not a folder that only user {os.getuid()} can enter "
            f"(owner {status.st_uid}, mode {stat.S_IMODE(status.st_mode):o}); remove it, or set XDG_RUNTIME_DIR"
        )
    return folder
