"""The demo: the whole server on this machine, a small chat workload for its models, the table, a clean end."""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from forebay.bench.baseline import Baseline
from forebay.bench.draws import Draws
from forebay.bench.errors import BenchError
from forebay.bench.generate import generate
from forebay.bench.lengths import Lengths
from forebay.bench.measure import Plan, measure
from forebay.bench.models_file import ModelLoad
from forebay.bench.progress import ProgressDisplay
from forebay.bench.report import Report
from forebay.bench.server_process import ServerProcess, scheduler_command
from forebay.bench.workload_file import Workload, write_workload
from forebay.runtime.config import Configuration, ConfigurationError, ModelSection, load
from forebay.runtime.text import ModelText

RATE = 2.0
"""Requests per second, of all models together."""

OUTPUT_LENGTHS = Lengths.parse("uniform:12:36")

LONGEST_S = 75.0
"""The replay is cut to what the devices could do one request after the other in this time; together they are faster."""

TASKS = (
    "Explain {} to a curious child.",
    "Write a short poem about {}.",
    "Give me three interesting facts about {}.",
    "I have to give a talk about {}. How should I begin?",
    "What do most people get wrong about {}?",
    "Summarise the history of {} in two sentences.",
    "Why is {} important?",
    "Ask me three questions that show whether I have understood {}.",
)
TOPICS = (
    "hydroelectric power", "bicycles", "the water cycle", "chess", "bread", "lighthouses", "volcanoes", "libraries",
    "the metric system", "honey bees", "canals", "photography", "tides", "pencils", "the printing press", "jazz",
)  # fmt: skip
REPLIES = (
    "That is a good question. Where would you like to begin: with an overview, or with the details?",
    "With pleasure. Here is a first answer in brief; tell me if you would like to hear more.",
)


class ChatPrompts:
    """Conversations of one or three turns, as the model's chat template writes them; short answers."""

    def __init__(self, text: ModelText) -> None:
        self._text = text

    def draw(self, draws: Draws) -> tuple[list[int], int]:
        topic = TOPICS[draws.below(len(TOPICS))]
        turns = [("user", TASKS[draws.below(len(TASKS))].format(topic))]
        if draws.uniform() < 0.3:
            turns.append(("assistant", REPLIES[draws.below(len(REPLIES))]))
            turns.append(("user", TASKS[draws.below(len(TASKS))].format(topic)))
        messages = [{"role": role, "content": content} for role, content in turns]
        return self._text.chat(messages), OUTPUT_LENGTHS.draw(draws)


@dataclass(frozen=True)
class Result:
    """`report` is the replay's, `problems` what else went wrong, each a sentence for people."""

    report: Report
    problems: Sequence[str]


def chat_workload(models: Sequence[ModelSection], requests: int) -> Workload:
    """Requests in proportion to the models' popularity. Raises BenchError if a model has no usable tokenizer."""
    total = sum(model.popularity for model in models)
    loads = [ModelLoad(model.name, RATE * model.popularity / total, model.path) for model in models]
    try:
        texts = {path: ModelText.load(path) for path in {model.path for model in models}}
        return generate(loads, lambda model: ChatPrompts(texts[model.model]), seed=0, num_requests=requests)
    except ValueError as error:
        raise BenchError(f"the demo cannot write prompts: {error}") from error


def cut_to_speed(workload: Workload, baseline: Baseline, devices: int) -> Workload:
    """The part of the workload that `devices` devices can do in LONGEST_S, at least one request."""
    seconds = 0.0
    for count, request in enumerate(workload.requests):
        alone = baseline.models[request.model_name].latency_s(request.prompt_tokens, request.output_tokens)
        seconds += alone / devices
        if seconds > LONGEST_S:
            return workload.first(max(count, 1))
    return workload


def describe_cut(kept: int, requests: int, devices: int) -> str:
    """How many of `requests` are replayed, and why not all."""
    if kept == requests:
        return f"all {requests} requests are replayed"
    where = f"{devices} devices" if devices > 1 else "one device"
    return (
        f"{kept} of {requests} requests are replayed: what {where} of the speed just measured can do in "
        f"{LONGEST_S:g} s, one request after the other"
    )


async def demonstrate(
    config: Path, folder: Path, requests: int, command: Sequence[str], progress: ProgressDisplay, stop: asyncio.Event
) -> Result:
    """Starts the server of `config`, replays a workload, stops the server. Files go to `folder`, among them the
    workload as it is replayed. Raises BenchError; however it ends, the server and all its processes have ended."""
    configuration = _prepare(config, folder)
    # Running requests may end (drain), then front door and workers (stop) before the scheduler itself does.
    stop_s = configuration.timeouts.drain + 2 * configuration.timeouts.stop + 5
    async with ServerProcess(scheduler_command(config), folder / "server.log", stop_s) as server:
        begin = time.monotonic()
        progress.start("server", None)
        generating = asyncio.create_task(asyncio.to_thread(chat_workload, configuration.models, requests))
        try:
            url = await server.ready(stop, lambda what: progress.update(0, what))
        finally:
            await asyncio.wait([generating])
        progress.update(1, f"ready at {url} after {time.monotonic() - begin:.1f} s", last=True)
        workload_path, devices = folder / "workload.json", len(configuration.devices)

        def adapt(whole: Workload, baseline: Baseline) -> Workload:
            kept = cut_to_speed(whole, baseline, devices)
            write_workload(workload_path, kept)
            progress.start("workload", None)
            progress.update(1, describe_cut(len(kept.requests), len(whole.requests), devices), last=True)
            return kept

        plan = Plan(base_url=url, workload=generating.result(), origin=str(workload_path), command=command)
        report = await measure(plan, progress, stop, adapt)
        progress.start("server", None)
        progress.update(0, "stopping")
        await server.stop()
        progress.update(1, f"ended with status {server.returncode}", last=True)
    problems = []
    if server.returncode != 0:
        problems.append(f"the server ended with status {server.returncode}; see {server.log}")
    if server.left_behind:
        problems.append(f"the server left processes behind, now killed: {server.left_behind}; see {server.log}")
    return Result(report, problems)


def _prepare(config: Path, folder: Path) -> Configuration:
    try:
        configuration = load(config)
    except ConfigurationError as error:
        raise BenchError(str(error)) from error
    if not configuration.models:
        raise BenchError(f"{config}: models: is empty; the demo needs at least one model")
    folder.mkdir(parents=True, exist_ok=True)
    return configuration
