"""Model folders with tiny tokenizers, for tests that need text but no model."""

import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message.content == 'refuse' %}{{ raise_exception('no such talk here') }}{% endif %}"
    "<|start|>{{ message.role }}\n{{ message.content }}<|end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)
CORPUS = [
    "the water turns the wheel and the wheel turns the mill, while the pool fills again behind the gate",
    "Ein Mühlrad dreht sich, 水は流れる, and 🌊 comes and goes.",
]


def byte_level(folder: Path, *, chat: bool = True, vocabulary: int = 400) -> Path:
    """As GPT-2, Llama 3, Qwen and SmolLM2: any byte is a token, words carry their space in front."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=["<|end|>", "<|start|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return _save(folder, tokenizer, chat)


def sentence_piece(folder: Path) -> Path:
    """As Llama 2 and Mistral: ▁ stands for a space, and unknown characters are bytes `<0xNN>`."""
    words = ["▁the", "▁wheel", "▁turns", "▁water", "s", ",", "▁", "a", "e"]
    pieces = [("<unk>", 0.0), ("</s>", 0.0)]
    pieces += [(f"<0x{byte:02X}>", -20.0) for byte in range(256)]
    pieces += [(word, -float(rank + 1)) for rank, word in enumerate(words)]
    tokenizer = Tokenizer(models.Unigram(pieces, unk_id=0, byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    tokenizer.add_special_tokens([AddedToken("</s>", special=True)])
    return _save(folder, tokenizer, chat=False)


def _save(folder: Path, tokenizer: Tokenizer, chat: bool) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    # A model trained with a length limit: it must not cut what clients send.
    tokenizer.enable_truncation(16)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": 16}
    if chat:
        config["chat_template"] = CHAT_TEMPLATE
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "config.json").write_text(json.dumps({"vocab_size": 512}))
    return folder
