"""A tokenizer for a folder that has only a config.json: servers want one, though prompts go as token ids."""

import json
import os
from pathlib import Path

from forebay.bench.errors import BenchError


def ensure_tokenizer(folder: Path) -> bool:
    """Writes tokenizer.json and tokenizer_config.json, a made-up word for each of the model's token ids, unless there
    is a tokenizer.json. Whether it was written. Raises BenchError where config.json has no vocabulary, and OSError."""
    if (folder / "tokenizer.json").exists():
        return False
    try:
        config = json.loads((folder / "config.json").read_text())
        size = int(config["vocab_size"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise BenchError(f"model {folder}: no vocab_size to read in its config.json ({error!r})") from error
    tokenizer: dict[str, object] = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": {"type": "WhitespaceSplit"},
        "post_processor": None,
        "decoder": None,
        "model": {"type": "WordLevel", "vocab": {f"w{token}": token for token in range(size)}, "unk_token": "w0"},
    }
    for name, content in (
        ("tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": 1 << 20}),
        ("tokenizer.json", tokenizer),
    ):
        partial = folder / f".{name}.partial"
        partial.write_text(json.dumps(content))
        os.replace(partial, folder / name)
    return True
