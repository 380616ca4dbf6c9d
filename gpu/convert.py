"""`python -m forebay.gpu.convert`: turns a GGUF file into a model folder in Hugging Face's layout. Only the command
line; the work is in gpu/gguf.py.
"""

import argparse
import sys
from pathlib import Path

from forebay.gpu.gguf import DEFAULT_PACKAGE, ConversionError, convert_gguf, find_packaged_gguf


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m forebay.gpu.convert",
        description="Converts a GGUF file to a model folder, once: a folder that was made from the same file is left "
        "as it is, one that was made from another is refused.",
    )
    origin = parser.add_mutually_exclusive_group()
    origin.add_argument("--package", default=DEFAULT_PACKAGE, help="installed package with a GGUF file (%(default)s)")
    origin.add_argument("--gguf", type=Path, metavar="FILE", help="a GGUF file")
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="where the model goes")
    options = parser.parse_args(arguments)
    folder: Path = options.folder.absolute()
    try:
        source = options.gguf.absolute() if options.gguf else find_packaged_gguf(options.package)
        convert_gguf(source, folder, lambda line: _tell(f"  {line}"))
    except ConversionError as error:
        _tell(f"error: {error}")
        return 1
    _tell(f"{folder} is ready")
    return 0


def _tell(line: str) -> None:
    sys.stderr.write(line + "\n")


if __name__ == "__main__":
    sys.exit(main())
