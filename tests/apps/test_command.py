"""The command `forebay`."""

import subprocess
import sys
from pathlib import Path

import pytest

from forebay import __version__

COMMAND = Path(sys.executable).with_name("forebay")


@pytest.mark.parametrize(
    ("arguments", "status", "words"),
    [
        (["--help"], 0, "joins a scheduler"),
        ([], 2, "usage: forebay COMMAND"),
        (["serve"], 2, "there is no command 'serve' (there is: scheduler, worker, mps, convert, journal)"),
        (["--version"], 0, f"forebay {__version__}\n"),
        (["scheduler", "--help"], 0, "--ready-file"),
        (["worker", "--help"], 0, "--gpu"),
        (["worker"], 2, "--gpu"),
        (["convert", "--help"], 0, "--gguf"),
        (["journal", "/nonexistent"], 1, "No such file"),
    ],
)
def test_each_word_does_what_it_says(arguments: list[str], status: int, words: str) -> None:
    ended = subprocess.run([COMMAND, *arguments], capture_output=True, text=True, timeout=50, check=False)
    assert ended.returncode == status
    assert words in ended.stdout + ended.stderr
