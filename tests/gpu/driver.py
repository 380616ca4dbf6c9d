"""What the tests of the runner need: tiny models, a block allocator, and a way to say steps in one line."""

from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, MistralConfig, Qwen2Config

from forebay.gpu.runner import Runner
from forebay.transport.messages import CloseSequence, OpenSequence, Sampling, StepDone, StepPlan, Work
from forebay.transport.messages.steps import LaneKind

VOCABULARY = 211

TINY: dict[str, Any] = {
    "llama": LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=48, intermediate_size=96, num_hidden_layers=3, num_attention_heads=6,
        num_key_value_heads=2, head_dim=8, max_position_embeddings=512, eos_token_id=[5, 6],
    ),
    "mistral": MistralConfig(
        vocab_size=VOCABULARY, hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=4, head_dim=16, max_position_embeddings=512, sliding_window=None, eos_token_id=7,
    ),
    "qwen2": Qwen2Config(
        vocab_size=VOCABULARY, hidden_size=40, intermediate_size=80, num_hidden_layers=5, num_attention_heads=5,
        num_key_value_heads=1, max_position_embeddings=512, eos_token_id=8,
    ),
}  # fmt: skip
"""Random models of different depth, number of heads and head size."""


def write_tiny(family: str, folder: Path, seed: int = 0) -> Path:
    """Saves a random model. Its weights are wide enough for the next token to depend on all of the text."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(TINY[family], dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=0.25)
    model.save_pretrained(folder)
    return folder


def generate(folder: Path, prompt: list[int], count: int) -> list[int]:
    """Greedy continuation by transformers itself, without stopping."""
    return continue_with(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32), prompt, count)


def continue_with(model: Any, prompt: list[int], count: int) -> list[int]:
    """`generate` with a model that is loaded."""
    out = model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        max_new_tokens=count,
        do_sample=False,
        eos_token_id=-1,
        pad_token_id=0,
    )
    return list(out[0, len(prompt) :].tolist())


def prompt_of(length: int, seed: int, vocabulary: int = VOCABULARY) -> list[int]:
    return list(np.random.default_rng(seed).integers(10, vocabulary, length).tolist())


class Blocks:
    """Hands out bytes of a pool that models of several shapes share: random places, never two owners."""

    def __init__(self, capacity: int, seed: int = 0) -> None:
        self._free = np.ones(capacity // 64, bool)
        self._random = np.random.default_rng(seed)

    def take(self, runner: Runner, count: int) -> tuple[int, ...]:
        size = runner.block_bytes // 64
        assert runner.block_bytes % 64 == 0
        found: list[int] = []
        for block in self._random.permutation(runner.blocks).tolist():
            if len(found) == count:
                break
            place = slice(block * size, (block + 1) * size)
            if self._free[place].all():
                self._free[place] = False
                found.append(block)
        assert len(found) == count, "the test's pool is too small"
        return tuple(found)

    def give(self, runner: Runner, blocks: list[int]) -> None:
        """For others, whose steps come after all that use them so far."""
        size = runner.block_bytes // 64
        for block in blocks:
            self._free[block * size : (block + 1) * size] = True


@dataclass
class Request:
    """One sequence of a test. `tokens` are the known ones, `computed` those with keys and values in the pool."""

    number: int
    tokens: list[int]
    prompt_tokens: int
    computed: int = 0
    table: int = 0
    blocks: list[int] = field(default_factory=list)
    stopped: list[int] = field(default_factory=list)


class Driver:
    """Opens sequences on a runner and runs steps."""

    def __init__(self, runner: Runner, blocks: Blocks) -> None:
        self.runner = runner
        self.blocks = blocks
        self.steps = 0
        self.sequences = 0
        self.lane: LaneKind = "mixed"
        self.share = 0

    def open(self, tokens: list[int], sampling: Sampling | None = None, prompt_tokens: int | None = None) -> Request:
        request = Request(self.sequences, list(tokens), prompt_tokens or len(tokens))
        self.sequences += 1
        data = np.array(tokens, "<u4").tobytes()
        sampling = sampling or Sampling(max_tokens=1000, ignore_eos=True)
        self.runner.open(OpenSequence(request.number, self.runner.spec.name, data, request.prompt_tokens, sampling))
        return request

    def close(self, request: Request) -> None:
        self.runner.close(CloseSequence(request.number, self.runner.spec.name))

    def give(self, request: Request) -> None:
        """Closes it, and lets others have its blocks."""
        self.close(request)
        self.blocks.give(self.runner, request.blocks)

    def launch(self, *counts: tuple[Request, int]) -> "Future[StepDone]":
        """Launches a step that computes the next `count` tokens of each request; it samples where these are all."""
        work = []
        for request, count in counts:
            end = request.computed + count
            needed = max(0, -(-end // self.runner.shape.block_tokens) - request.table)
            blocks = self.blocks.take(self.runner, needed)
            request.blocks += blocks
            kept = request.table if request.computed else 0
            request.table += needed
            sample = end == len(request.tokens)
            work.append(Work(request.number, request.computed, count, kept, blocks, sample))
            request.computed = end
            if sample:
                request.tokens.append(-1)
        self.steps += 1
        plan = StepPlan(self.steps, self.runner.spec.name, tuple(work), self.lane, self.share)
        return self.runner.launch(plan)

    def finish(self, future: "Future[StepDone]", *requests: Request) -> None:
        """Waits for a step and fills in the tokens drawn for `requests`, in its order."""
        done = future.result(timeout=60)
        tokens = np.frombuffer(done.tokens, "<u4").tolist()
        assert len(tokens) == len(requests) == len(done.stopped)
        for request, token, stopped in zip(requests, tokens, done.stopped, strict=True):
            request.tokens[request.tokens.index(-1)] = token
            request.stopped.append(stopped)

    def step(self, *counts: tuple[Request, int]) -> None:
        before = [len(request.tokens) for request, _ in counts]
        future = self.launch(*counts)
        self.finish(future, *(r for (r, _), n in zip(counts, before, strict=True) if len(r.tokens) > n))

    def restart(self, request: Request) -> None:
        """As after a preemption: what was computed is given up, the blocks stay taken."""
        request.computed = request.table = 0
