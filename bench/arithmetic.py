"""What a step must at least read and compute, and how long a device needs for that: the yardstick of measured times."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forebay.bench.errors import BenchError


@dataclass(frozen=True)
class Ceilings:
    """What a device was measured to do at most: `bytes_per_s` of memory traffic (a large copy, reads and writes
    counted) and `operations_per_s` (a large matrix product, a multiplication and an addition being two)."""

    bytes_per_s: float
    operations_per_s: float

    def seconds(self, work: "StepWork") -> float:
        """The least time for this work, where memory and arithmetic overlap entirely."""
        return max(work.bytes / self.bytes_per_s, work.operations / self.operations_per_s)


@dataclass(frozen=True)
class StepWork:
    """Bytes read and written, and operations, of one step or several."""

    bytes: float
    operations: float

    def __add__(self, other: "StepWork") -> "StepWork":
        return StepWork(self.bytes + other.bytes, self.operations + other.operations)


@dataclass(frozen=True)
class Arithmetic:
    """A decoder by its sizes. `body` counts the weights that every token meets, `head` those of the last projection,
    which only rows that sample need; the table of embeddings is looked up, not multiplied. Activations are not counted:
    a good kernel keeps most of them on the chip. Of a mixture of experts all weights are counted.
    `vocabulary`: how many token ids there are."""

    body: int
    head: int
    layers: int
    heads: int
    kv_heads: int
    head_size: int
    element_bytes: int
    vocabulary: int

    @property
    def weight_bytes(self) -> int:
        """Of what a step reads; a table of embeddings of its own comes on top in memory."""
        return (self.body + self.head) * self.element_bytes

    @property
    def kv_bytes(self) -> int:
        """Of one token."""
        return 2 * self.layers * self.kv_heads * self.head_size * self.element_bytes

    def step(self, sequences: int, start: int, count: int, *, sampled: int) -> StepWork:
        """One forward pass in which each of `sequences` computes `count` tokens from position `start` on; `sampled`
        rows draw a token."""
        tokens = sequences * count
        # Token i of a chunk attends to start + i + 1 tokens.
        attended = sequences * (count * start + count * (count + 1) / 2)
        attention = 4 * self.layers * self.heads * self.head_size * attended
        weights = self.body + (self.head if sampled else 0)
        return StepWork(
            weights * self.element_bytes + (sequences * (start + count) + tokens) * self.kv_bytes,
            2 * (self.body * tokens + self.head * sampled) + attention,
        )

    def decode(self, batch: int, context: int) -> StepWork:
        """A decode step of `batch` sequences that have `context` tokens each."""
        return self.step(batch, context, 1, sampled=batch)

    def prefill(self, batch: int, length: int, step_tokens: int) -> StepWork:
        """`batch` prompts of `length` tokens in as few steps of `step_tokens` as hold them."""
        whole = self.step(batch, 0, length, sampled=batch)
        more_steps = -(-batch * length // step_tokens) - 1
        return whole + StepWork(more_steps * self.body * self.element_bytes, 0)


def read_arithmetic(folder: Path, dtype: str) -> Arithmetic:
    """Of the model whose config.json is in `folder`; no weight is read. Raises BenchError."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    if not (folder / "config.json").is_file():
        raise BenchError(f"model {folder}: holds no config.json; give a model folder in Hugging Face's layout")
    try:
        config: Any = AutoConfig.from_pretrained(folder, local_files_only=True)
        with torch.device("meta"):
            model: Any = AutoModelForCausalLM.from_config(config)
    except Exception as error:  # whatever the library makes of a bad file
        raise BenchError(f"model {folder}: transformers cannot make it from its config.json: {error}") from error
    output = model.get_output_embeddings()
    head = 0 if output is None else output.weight.numel()
    body = 0
    for module in model.modules():
        if module is not output and not isinstance(module, torch.nn.Embedding):
            body += sum(weight.numel() for weight in module.parameters(recurse=False) if weight.dim() > 1)
    heads = config.num_attention_heads
    return Arithmetic(
        body,
        head,
        config.num_hidden_layers,
        heads,
        getattr(config, "num_key_value_heads", None) or heads,
        getattr(config, "head_dim", None) or config.hidden_size // heads,
        torch.empty((), dtype=getattr(torch, dtype)).element_size(),
        config.vocab_size,
    )
