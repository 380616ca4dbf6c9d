"""Running answers of one model while another (or the same) reads long prompts, in each way to share the SMs: what a
token takes and how fast the prompts are read, each beside what it is alone, on the same device and with the same lane
core.
"""

import random
import statistics
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from forebay.bench.errors import BenchError
from forebay.bench.figures import Figure, write_figures
from forebay.bench.interference_figures import Found, print_table
from forebay.bench.interference_loop import Loop, Seen, Watch
from forebay.gpu.backend import memory_backend
from forebay.gpu.device import open_device
from forebay.gpu.movable import Description, describe
from forebay.gpu.runner import Runner
from forebay.runtime.step_trace import StepTrace
from forebay.sched.cost_table import CostRow
from forebay.sched.partition import SPLITS, Chunk, Decoding, Partition, Streams, make_partition
from forebay.sched.sequence import Lane
from forebay.sched.sequence import Sequence as LaneSequence
from forebay.transport.messages import BLOCK_TOKENS, DeviceSettings, ModelSpec, Targets

CUDA_SLAB, CPU_SLAB = 256 << 20, 32 << 20

FIRST_TOKENS = 8
"""Of each answer, with which nothing is timed."""

COST_NAME = "model"


@dataclass(frozen=True)
class Plan:
    """`models`: 2 where the prompts are a second model's; `decodes` answers run on prompts of `context` tokens, of up
    to `tokens` each, of which twice `steps` are timed undisturbed; `prompts` prompts of `prompt` tokens are timed;
    `target` is auto's, as a multiple of the undisturbed TPOT; `learn`: auto gets no measured costs."""

    model: Path
    dtype: str
    device: str
    load_format: str
    modes: tuple[str, ...]
    models: int
    decodes: int
    context: int
    tokens: int
    steps: int
    prompt: int
    prompts: int
    step_tokens: int
    target: float = 1.5
    learn: bool = False
    threads: int = 0

    def check(self, known: Sequence[str]) -> None:
        """Raises BenchError."""
        for mode in self.modes:
            if mode not in known and not _is_share(mode):
                raise BenchError(
                    f"--partitions: {mode!r} is unknown; there is: {', '.join(known)}, and shares of the SMs in per "
                    f"cent, 1 to 99"
                )
            if mode != "none" and self.device.startswith("cpu:"):
                raise BenchError(f"--partitions {mode}: {self.device} has no SMs to share; none alone is allowed there")
        if len(set(self.modes)) < len(self.modes):
            raise BenchError(f"--partitions {','.join(self.modes)}: one is named twice; name each once")
        least = FIRST_TOKENS + 2 * self.steps + 2
        if self.tokens < least:
            raise BenchError(
                f"--tokens {self.tokens}: twice --steps {self.steps} are timed undisturbed, and some while prompts are "
                f"read: at least {least} are needed, and several times that are good"
            )

    @property
    def prompt_model(self) -> str:
        return "b" if self.models == 2 else "a"

    @property
    def title(self) -> str:
        who = "another model" if self.models == 2 else "the same model"
        return (
            f"{self.decodes} answers after {self.context:,} tokens, while prompts of {self.prompt:,} are read by {who}"
        )

    def specs(self) -> list[ModelSpec]:
        def spec(name: str, sequences: int) -> ModelSpec:
            return ModelSpec(
                name,
                str(self.model.resolve()),
                self.dtype,
                max_context=max(self.context + self.tokens, self.prompt) + BLOCK_TOKENS,
                max_sequences=sequences,
                step_tokens=max(self.step_tokens, self.decodes + 2),
                load_format=self.load_format,
            )

        return [spec("a", self.decodes + 2), spec("b", 2)][: self.models]


def _is_share(mode: str) -> bool:
    return mode.isascii() and mode.isdecimal() and 0 < int(mode) < 100


class Bound(Streams):
    """Prefills on one share of the SMs while decodes run."""

    def __init__(self, share: int) -> None:
        self._share = share

    def chunk(self, now: float, lane: Lane, oldest: LaneSequence, decoding: Iterable[Decoding]) -> Chunk | None:
        return Chunk(lane.step_tokens, self._share)


def measure(plan: Plan, json: Path | None, trace: Path | None, arguments: list[str] | None) -> int:
    """Runs all modes, prints a table, writes the figures after each; returns the exit status."""
    if plan.device.startswith("cpu:"):
        devices = {}
    else:
        with memory_backend(plan.device) as memory:
            devices = {plan.device: memory.describe()}
    slab = CPU_SLAB if plan.device.startswith("cpu:") else CUDA_SLAB
    described = describe(plan.specs()[0])
    slabs = slabs_for(plan, described, slab)
    divided = any(mode != "none" for mode in plan.modes)
    settings = DeviceSettings(slabs * slab, slab, plan.threads, partition="auto" if divided else "none")
    all_found: list[Found] = []
    figures: dict[str, Figure] = {}
    device = open_device(plan.device, settings)
    try:
        begin = time.perf_counter()
        runners = {spec.name: device.load(spec) for spec in plan.specs()}
        _prepare(plan, runners)
        bench = Bench(plan, runners, described.vocabulary, slabs, slab)
        bench.warm_up()
        print(f"loading and warming up took {time.perf_counter() - begin:.0f} s", flush=True)
        for mode in plan.modes:
            with ExitStack() as undo:
                steps = None
                if trace is not None and mode == plan.modes[-1]:
                    steps = StepTrace(trace, plan.device)
                    undo.callback(steps.close)
                found = bench.mode(mode, steps)
            all_found.append(found)
            figures |= found.figures()
            for name, figure in found.figures().items():
                print(f"{name:32}{figure.value:12,.3f} {figure.unit:9}alone {figure.baseline:12,.3f}", flush=True)
            if json is not None:
                words = ["python", "-m", "bench.interference", *(sys.argv[1:] if arguments is None else arguments)]
                write_figures(json, "bench.interference", words, figures, devices)
    finally:
        device.close()
    print_table(plan.title, all_found)
    return 0


def slabs_for(plan: Plan, described: Description, slab: int) -> int:
    """Enough for every model's sequences in its equal part of the pool, for quotas are not what is measured."""
    blocks = (plan.decodes + 1) * (-(-(plan.context + plan.tokens) // BLOCK_TOKENS) + 1)
    blocks += 2 * (-(-plan.prompt // BLOCK_TOKENS) + 1)
    return plan.models * (-(-blocks * described.shape.block_bytes // slab) + 1)


def _prepare(plan: Plan, runners: Mapping[str, Runner]) -> None:
    """Graphs of the undivided lane, where the device has been opened for divided ones; and whether all fits."""
    for runner in runners.values():
        needed = max(plan.context + plan.tokens, plan.prompt)
        if runner.max_context < needed:
            raise BenchError(
                f"{plan.model}: takes {runner.max_context} tokens at most, {needed} are asked for: lower --prompt, "
                f"--tokens or --context"
            )
    if not plan.device.startswith("cpu:") and "none" in plan.modes:
        from forebay.gpu.cuda_runner import CudaRunner

        for runner in runners.values():
            assert isinstance(runner, CudaRunner)
            runner.prepare("mixed")


class Bench:
    """Over loaded models by name, whose pool has `slabs` slabs of `slab` bytes. Prompts are random token ids below
    `vocabulary`."""

    def __init__(self, plan: Plan, runners: Mapping[str, Runner], vocabulary: int, slabs: int, slab: int) -> None:
        self._plan = plan
        self._runners = runners
        self._vocabulary = range(vocabulary)
        self._slabs = slabs
        self._slab = slab
        self._chance = random.Random(0)
        self._targets: dict[str, Targets] = {}
        self._rows: tuple[CostRow, ...] = ()

    def _loop(self, partition: Partition, trace: StepTrace | None = None) -> Loop:
        return Loop(self._runners, self._slabs, self._slab, partition, COST_NAME, trace)

    def _prompt(self, tokens: int) -> list[int]:
        return self._chance.choices(self._vocabulary, k=tokens)

    def warm_up(self) -> None:
        """Whatever happens once: kernels are compiled, streams made, graphs captured, for every share of the SMs; and
        what `auto` is told is measured, without bounds."""
        modes = self._plan.modes
        if "none" in modes:
            self._try_out(make_partition("none"))
        shares = {int(mode) for mode in modes if _is_share(mode)}
        if "streams" in modes:
            shares.add(0)
        if "green" in modes:
            shares.add(SPLITS[0])
        if "auto" in modes:
            shares |= {0, *SPLITS}
        for share in sorted(shares):
            self._try_out(Bound(share))
        if "auto" in modes:
            self._try_out(make_partition("auto"))
            self._measure_for_auto()

    def _try_out(self, partition: Partition) -> None:
        plan = self._plan
        loop = self._loop(partition)
        prompt = min(plan.prompt, 2 * plan.step_tokens)
        self._read(loop, prompt)
        watch = self._answers(loop)
        watch.prompts(plan.prompt_model, [self._prompt(prompt)], 2)
        loop.cancel_all()

    def _measure_for_auto(self) -> None:
        plan = self._plan
        loop = self._loop(make_partition("streams"))
        rows = []
        for length in sorted({min(plan.step_tokens, plan.prompt), plan.prompt}):
            seconds = statistics.median(self._read(loop, length) for _ in range(3))
            rows.append(CostRow(COST_NAME, 1, 100, 1, length, 1e3 * seconds, None))
        tpot_s = statistics.median(self._answers(loop).tokens(plan.steps).gaps)
        rows.append(CostRow(COST_NAME, 1, 100, plan.decodes, plan.context + plan.steps // 2, None, 1e3 * tpot_s))
        loop.cancel_all()
        self._targets = {"a": Targets(tpot_s=plan.target * tpot_s)}
        self._rows = () if plan.learn else tuple(rows)
        told = ", ".join(f"{row.length:,} tokens in {row.prefill_ms:.1f} ms" for row in rows[:-1])
        print(f"undisturbed: a token in {1e3 * tpot_s:.2f} ms; prompts of {told}", flush=True)

    def mode(self, mode: str, trace: StepTrace | None) -> Found:
        plan = self._plan
        bound = _is_share(mode)
        loop = self._loop(Bound(int(mode)) if bound else make_partition(mode, self._targets, self._rows), trace)
        prefill_s = sum(self._read(loop, plan.prompt) for _ in range(plan.prompts))
        watch = self._answers(loop)
        before = watch.tokens(plan.steps)
        reserve = plan.steps + 1
        # One prompt ahead of those that count: what is learned from steps has been learned then.
        first = watch.prompts(plan.prompt_model, [self._prompt(plan.prompt)], reserve)
        beside = watch.prompts(plan.prompt_model, [self._prompt(plan.prompt) for _ in range(plan.prompts)], reserve)
        if not beside.took or not beside.gaps or not beside.prompt_tokens:
            raise BenchError(
                f"{mode}: the answers came to their end while the first prompts were read ({first.prompt_tokens} "
                f"tokens in {first.took:.2f} s): raise --tokens"
            )
        after = watch.tokens(plan.steps) if beside.whole else before
        loop.cancel_all()
        # The answers have grown meanwhile, and their steps with them: undisturbed is what it was before and after.
        gaps, decodes = [*before.gaps, *after.gaps], [*before.decodes, *after.decodes]
        alone = Seen(gaps, decodes, 0, before.took + after.took, before.chunks)
        return Found(mode, alone, beside, plan.prompts * plan.prompt / prefill_s)

    def _read(self, loop: Loop, tokens: int) -> float:
        """Seconds of a prompt of so many tokens, with the device to itself."""
        prompt = self._prompt(tokens)
        begin = time.perf_counter()
        loop.finish([loop.start(self._plan.prompt_model, prompt, 1)])
        return time.perf_counter() - begin

    def _answers(self, loop: Loop) -> Watch:
        """All answers, running."""
        plan = self._plan
        prompts = [self._prompt(plan.context) for _ in range(plan.decodes)]
        waiting = requests = {loop.start("a", prompt, plan.tokens) for prompt in prompts}
        # The first may be some tokens ahead of the last; none has come to its end.
        most = plan.tokens
        while waiting:
            drew = set(loop.step().drew)
            most -= bool(drew & requests)
            waiting = waiting - drew
        watch = Watch(loop, "a", requests, most)
        watch.tokens(FIRST_TOKENS)
        return watch
