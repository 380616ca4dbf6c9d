"""Conversion of a GGUF file: whole or not at all, the same model with its tokenizer and chat template, and a folder
that knows what it was made from."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from forebay.gpu import gguf
from forebay.gpu.convert import main
from forebay.gpu.gguf import ORIGIN, ConversionError, Origin, convert_gguf, find_packaged_gguf, is_complete


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
    assert json.loads((folder / ORIGIN).read_text())["name"] == find_packaged_gguf().name
    assert main([str(folder)]) == 0
    assert (folder / "model.safetensors").stat() == written
    assert (folder / "config.json").read_text() == (smollm2 / "config.json").read_text()


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """Begins as a GGUF file does, and holds no model."""
    path = tmp_path / "first.gguf"
    path.write_bytes(b"GGUF and some weights")
    return path


@pytest.fixture
def finished(tmp_path: Path, source: Path) -> Path:
    """A complete folder that was made from `source`."""
    return complete(tmp_path / "model", source)


def complete(folder: Path, source: Path | None) -> Path:
    folder.mkdir(exist_ok=True)
    for name in gguf.REQUIRED:
        (folder / name).write_text("{}")
    if source is not None:
        origin = Origin.of(source)
        content = {"name": origin.name, "bytes": origin.bytes, "sha256": origin.sha256}
        (folder / ORIGIN).write_text(json.dumps(content))
    return folder


def test_a_folder_made_from_the_same_content_is_left_alone(finished: Path, source: Path, capsys) -> None:
    renamed = source.rename(source.with_name("renamed.gguf"))
    before = {path.name: path.stat() for path in finished.iterdir()}
    assert convert_gguf(renamed, finished) is False
    assert main(["--gguf", str(renamed), str(finished)]) == 0
    assert f"{finished} is ready" in capsys.readouterr().err
    assert {path.name: path.stat() for path in finished.iterdir()} == before


def test_another_source_is_refused_by_name(finished: Path, source: Path, capsys) -> None:
    other = source.with_name("other.gguf")
    other.write_bytes(b"GGUF" + source.read_bytes()[:3:-1])  # the same size, other content
    assert other.stat().st_size == source.stat().st_size
    assert main(["--gguf", str(other), str(finished)]) == 1
    told = capsys.readouterr().err
    assert f"{finished} was made from first.gguf (21 bytes, SHA-256 " in told
    assert f"not from {other}" in told
    assert "is ready" not in told


@pytest.mark.parametrize("spoil", [lambda path: path.unlink(), lambda path: path.write_text("{}")])
def test_a_folder_of_unknown_origin_is_not_called_ready(
    finished: Path, source: Path, spoil: Callable[[Path], None]
) -> None:
    spoil(finished / ORIGIN)
    with pytest.raises(ConversionError, match=f"{finished} holds a model but does not say what it was made from"):
        convert_gguf(source, finished)
    assert is_complete(finished)


@pytest.mark.parametrize("target", ["model", "fresh"])
def test_a_source_that_is_absent_or_no_gguf_is_an_error_whatever_the_folder(
    finished: Path, target: str, capsys
) -> None:
    folder, absent, text = (finished.with_name(name) for name in (target, "absent.gguf", "notes.gguf"))
    text.write_text("not a model")
    assert main(["--gguf", str(absent), str(folder)]) == 1
    assert f"error: GGUF file {absent} does not exist" in capsys.readouterr().err
    assert main(["--gguf", str(text), str(folder)]) == 1
    assert f"error: {text} is no GGUF file: it does not begin with 'GGUF'" in capsys.readouterr().err
    assert main(["--gguf", str(finished), str(folder)]) == 1
    assert f"error: GGUF file {finished} cannot be read: Is a directory" in capsys.readouterr().err
    assert main(["--package", "no-such-package", str(folder)]) == 1
    assert "'no-such-package' is not installed" in capsys.readouterr().err
    assert folder.exists() == (target == "model")


def test_failed_conversion_leaves_nothing(source: Path, tmp_path: Path, capsys) -> None:
    folder = tmp_path / "out" / "model"
    assert main(["--gguf", str(source), str(folder)]) == 1
    assert f"error: {source} cannot be read as a model" in capsys.readouterr().err
    assert list(folder.parent.iterdir()) == []


def test_what_stands_in_the_way_is_named(source: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "notes.txt").write_text("mine")
    with pytest.raises(ConversionError, match=f"{folder} exists but is not a complete model"):
        convert_gguf(source, folder)
    assert (folder / "notes.txt").read_text() == "mine"
    with pytest.raises(ConversionError, match="'no-such-package' is not installed; install it with"):
        find_packaged_gguf("no-such-package")
    with pytest.raises(ConversionError, match="holds 0 GGUF files"):
        find_packaged_gguf("json")


@pytest.mark.parametrize("of_the_same", [True, False])
def test_of_two_conversions_at_once_one_folder_remains(
    source: Path, tmp_path: Path, monkeypatch, of_the_same: bool
) -> None:
    folder = tmp_path / "model"
    other = tmp_path / "other.gguf"
    other.write_bytes(b"GGUF of another kind")

    def write_while_another_finishes(_source: Path, working: Path, _report: Callable[[str], None]) -> None:
        complete(working, None)
        complete(folder, source if of_the_same else other)

    monkeypatch.setattr(gguf, "_write_model", write_while_another_finishes)
    if of_the_same:
        assert convert_gguf(source, folder) is True
    else:
        with pytest.raises(ConversionError, match=r"was made from other\.gguf"):
            convert_gguf(source, folder)
    assert is_complete(folder)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["first.gguf", "model", "other.gguf"]
