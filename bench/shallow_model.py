"""The first layers of a model as a model of their own: for benchmarks of scheduling, which sees how long steps take and
never what they say. More requests fit into the same minutes, and so chance decides less."""

import json
import re
import shutil
from pathlib import Path

from forebay.bench.errors import BenchError

_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")


def write_shallow(model: Path, layers: int, folder: Path) -> Path:
    """Writes the first `layers` layers of the model in folder `model` to `folder`, with its tokenizer, and returns
    `folder`. Raises BenchError for a model that has fewer, or that cannot be read."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file, save_file

    try:
        config = json.loads((model / "config.json").read_text())
        found = config["num_hidden_layers"]
        if layers > found:
            raise BenchError(f"--layers {layers}: {model} has {found}; give 1 to {found}")
        tensors = {
            name: tensor
            for path in sorted(model.glob("*.safetensors"))
            for name, tensor in load_file(path).items()
            if (layer := _LAYER.search(name)) is None or int(layer[1]) < layers
        }
    except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
        raise BenchError(
            f"{model} cannot be read ({type(error).__name__}: {error}); give a model folder in Hugging Face's layout"
        ) from error
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    for path in model.iterdir():
        if path.is_file() and ".safetensors" not in path.name:
            shutil.copyfile(path, folder / path.name)
    (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": layers}))
    return folder
