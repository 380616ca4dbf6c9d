"""A whole server as real processes, for tests: started from a configuration, watched through its log, and reaped."""

import json
import os
import queue
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Self

import httpx
import psutil
import yaml

ROOT = Path(__file__).resolve().parent.parent.parent
START_S = 120.0


class Process:
    """A process of ours whose log (JSON lines on standard error) a test can wait for."""

    def __init__(self, *arguments: str, runtime: Path, cwd: Path = ROOT) -> None:
        self.lines: list[dict[str, Any]] = []
        self.text: list[str] = []
        self._news: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
        self.process = subprocess.Popen(
            [sys.executable, "-m", *arguments],
            cwd=cwd,
            env={**os.environ, "XDG_RUNTIME_DIR": str(runtime), "OMP_NUM_THREADS": "1"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        self._offspring: dict[int, psutil.Process] = {}
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.text.append(line)
            try:
                self._news.put(json.loads(line))
            except ValueError:
                self._news.put({"event": line.rstrip(), "level": "raw"})
        self._news.put(None)

    def until(self, what: str | Callable[[dict[str, Any]], bool], timeout: float = START_S) -> dict[str, Any]:
        """The next log line with that event, or that satisfies the condition."""
        matches = what if callable(what) else lambda line: line["event"] == what
        deadline = time.monotonic() + timeout
        while True:
            try:
                line = self._news.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                raise AssertionError(f"no {what!r} within {timeout} s in the log:\n{self.log}") from None
            assert line is not None, f"the process ended before {what!r}; its log:\n{self.log}"
            self.lines.append(line)
            if matches(line):
                return line

    @property
    def log(self) -> str:
        return "".join(self.text)

    def children(self) -> dict[int, psutil.Process]:
        """All processes that it ever started, as far as a test asked while they lived."""
        for child in psutil.Process(self.process.pid).children(recursive=True):
            self._offspring[child.pid] = child
        return self._offspring

    def wait(self, timeout: float = 60.0) -> int:
        """Its exit status; its whole log has been read then."""
        status = self.process.wait(timeout)
        self._reader.join(timeout)
        return status

    def assert_nothing_left(self, timeout: float = 15.0) -> None:
        _, alive = psutil.wait_procs(list(self._offspring.values()), timeout=timeout)
        assert not alive, f"left behind: {alive}"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        for process in [self.process, *self._offspring.values()]:
            try:
                process.send_signal(signal.SIGCONT)
                process.kill()
            except (ProcessLookupError, psutil.NoSuchProcess):
                pass
        self.process.wait(30)
        self._reader.join(30)
        if self.process.stderr is not None:
            self.process.stderr.close()


def short_folder() -> Path:
    """For sockets: pytest's own folders are too long for a Unix socket's address."""
    return Path(tempfile.mkdtemp(prefix="fb-"))


class Server(Process):
    """`python -m runtime.scheduler` with a configuration; ready when all models are."""

    def __init__(
        self,
        configuration: dict[str, Any] | None,
        folder: Path,
        *arguments: str,
        ready: bool = True,
        runtime: Path | None = None,
    ) -> None:
        self.folder = folder
        self.runtime = runtime or short_folder()
        given: tuple[str, ...] = ()
        if configuration is not None:
            path = folder / "config.yaml"
            path.write_text(yaml.safe_dump(configuration))
            given = (str(path),)
        super().__init__("runtime.scheduler", *given, "--port", "0", *arguments, runtime=self.runtime)
        self.url = ""
        if ready:
            try:
                self.start(configuration or {})
            except BaseException:
                self.__exit__()
                raise

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        shutil.rmtree(self.runtime, ignore_errors=True)

    def start(self, configuration: dict[str, Any]) -> None:
        """Waits until every replica is loaded."""
        replicas = sum(len(model["placement"]) for model in configuration.get("models", ()))
        seen = 0
        while seen < replicas or not self.url:
            line = self.until(lambda line: line["event"] in ("requests can be sent", "a model is ready"))
            seen += line["event"] == "a model is ready"
            self.url = line.get("url", self.url)
        self.children()

    def get(self, path: str) -> httpx.Response:
        return httpx.get(self.url + path, timeout=30)

    def workers(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self.get("/workers").json()
        return found

    def complete(self, body: dict[str, Any]) -> httpx.Response:
        return httpx.post(f"{self.url}/v1/completions", json=body, timeout=120)

    def stop(self, timeout: float = 60.0) -> int:
        self.children()
        self.process.send_signal(signal.SIGTERM)
        return self.wait(timeout)


def events(response: httpx.Response) -> Iterator[dict[str, Any]]:
    """The events of a stream, up to [DONE]."""
    for line in response.iter_lines():
        if line == "data: [DONE]":
            return
        if line.startswith("data: "):
            yield json.loads(line.removeprefix("data: "))


def configuration(model: Path, **changes: Any) -> dict[str, Any]:
    """The demo's: three models on two CPU devices, one thread each; quick to notice and to stop."""
    return {
        "devices": [{"device": f"cpu:{n}", "memory": "256MiB", "slab": "16MiB", "threads": 1} for n in (0, 1)],
        "models": [
            {"name": "llm-0", "path": str(model), "placement": ["cpu:0", "cpu:1"], "popularity": 12},
            {"name": "llm-1", "path": str(model), "placement": ["cpu:0"], "popularity": 5},
            {"name": "llm-2", "path": str(model), "placement": ["cpu:1"], "popularity": 3},
        ],
        **changes,
    }


def small(model: Path, **changes: Any) -> dict[str, Any]:
    """One model on one device."""
    return {
        "devices": [{"device": "cpu:0", "memory": "128MiB", "slab": "16MiB", "threads": 1}],
        "models": [{"name": "llm", "path": str(model), "placement": ["cpu:0"]}],
        **changes,
    }
