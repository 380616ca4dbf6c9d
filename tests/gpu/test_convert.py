"""Conversion of a GGUF file: whole or not at all, and the same model with its tokenizer and chat template."""

import json
from pathlib import Path

import pytest

from forebay.gpu import convert
from forebay.gpu.convert import ConversionError, convert_gguf, find_packaged_gguf, is_complete, main


@pytest.mark.model
@pytest.mark.timeout(180)
def test_packaged_model_is_converted_once_and_whole(tmp_path, smollm2, capsys) -> None:
    from transformers import AutoTokenizer

    from forebay.gpu.weights import load_weights
    from forebay.transport.messages import ModelSpec

    folder = tmp_path / "models" / "smollm2"
    assert main([str(folder)]) == 0
    assert "M parameters" in capsys.readouterr().err
    assert [path.name for path in folder.parent.iterdir()] == ["smollm2"]
    assert "quantization_config" not in json.loads((folder / "config.json").read_text())
    weights = load_weights(ModelSpec(name="smollm2", path=str(folder)))
    assert (weights.shape.layers, weights.shape.kv_heads, weights.shape.head_size) == (30, 3, 64)
    assert weights.max_positions == 8192
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    assert {tokenizer.convert_tokens_to_ids("<|im_end|>")} == weights.end_of_sequence
    text = "In 2024, it's  an\n\n über-café: 12,345 \N{SNOWMAN} {x = y**2;}"
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    messages = [{"role": "user", "content": "Hi"}]
    chat = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert chat.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")
    ids = tokenizer(chat, add_special_tokens=False)["input_ids"]
    assert tokenizer.decode(ids) == chat
    assert ids.count(tokenizer.convert_tokens_to_ids("<|im_start|>")) == 3
    written = (folder / "model.safetensors").stat()
    assert written.st_mode & 0o777 == 0o644
    assert main([str(folder)]) == 0
    assert (folder / "model.safetensors").stat() == written
    assert (folder / "config.json").read_text() == (smollm2 / "config.json").read_text()


def test_complete_folder_is_left_alone(tmp_path, capsys) -> None:
    folder = _complete(tmp_path / "model")
    assert convert_gguf(tmp_path / "absent.gguf", folder) is False
    assert main(["--gguf", "absent.gguf", str(folder)]) == 0
    assert "ready" in capsys.readouterr().err


def test_failed_conversion_leaves_nothing(tmp_path, capsys) -> None:
    source = tmp_path / "broken.gguf"
    source.write_bytes(b"not a model")
    folder = tmp_path / "out" / "model"
    assert main(["--gguf", str(source), str(folder)]) == 1
    assert f"error: {source} cannot be read as a model" in capsys.readouterr().err
    assert list(folder.parent.iterdir()) == []


def test_what_stands_in_the_way_is_named(tmp_path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "notes.txt").write_text("mine")
    with pytest.raises(ConversionError, match=f"{folder} exists but is not a complete model"):
        convert_gguf(tmp_path / "x.gguf", folder)
    assert (folder / "notes.txt").read_text() == "mine"
    with pytest.raises(ConversionError, match=r"x\.gguf does not exist"):
        convert_gguf(tmp_path / "x.gguf", tmp_path / "other")
    with pytest.raises(ConversionError, match="'no-such-package' is not installed; install it with"):
        find_packaged_gguf("no-such-package")
    with pytest.raises(ConversionError, match="holds 0 GGUF files"):
        find_packaged_gguf("json")


def test_of_two_conversions_at_once_one_folder_remains(tmp_path, monkeypatch) -> None:
    folder = tmp_path / "model"
    source = tmp_path / "model.gguf"
    source.write_bytes(b"GGUF")

    def write_while_another_finishes(_source: Path, working: Path, _report) -> None:
        _complete(working)
        _complete(folder)

    monkeypatch.setattr(convert, "_write_model", write_while_another_finishes)
    assert convert_gguf(source, folder) is True
    assert is_complete(folder)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "model.gguf"]


def _complete(folder: Path) -> Path:
    folder.mkdir(exist_ok=True)
    for name in convert.REQUIRED:
        (folder / name).write_text("{}")
    return folder
