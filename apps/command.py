"""The command `forebay`: one word for each process that people start by hand."""

import sys
from collections.abc import Callable

from forebay import __version__

USAGE = """usage: forebay COMMAND [ARGUMENTS]
       forebay --version

commands:
  scheduler [CONFIG]   the server: scheduler, front door, and a worker for each configured device
  worker               joins a scheduler with one device
  mps start|stop DIR   an MPS daemon of your own, through which processes share a GPU
  convert FOLDER       turns a GGUF file into a model folder that is read fast
  journal FILE...      replays what --journal recorded, and compares every command

`forebay COMMAND --help` says more."""


def main() -> int:
    from forebay.apps import mps
    from forebay.gpu import convert
    from forebay.runtime import journal, scheduler, worker

    commands: dict[str, Callable[[list[str]], int]] = {
        "scheduler": scheduler.main,
        "worker": worker.main,
        "mps": mps.main,
        "convert": convert.main,
        "journal": journal.main,
    }
    _, *arguments = sys.argv
    if arguments and arguments[0] in commands:
        return commands[arguments[0]](arguments[1:])
    if arguments == ["--version"]:
        print(f"forebay {__version__}")
        return 0
    asked = bool(arguments) and arguments[0] in ("-h", "--help")
    if arguments and not asked:
        print(f"forebay: there is no command {arguments[0]!r} (there is: {', '.join(commands)})\n", file=sys.stderr)
    print(USAGE, file=sys.stdout if asked else sys.stderr)
    return 0 if asked else 2
