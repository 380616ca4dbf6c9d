"""One model on one lane of a CUDA device: takes a checked step from the host to the stream, and brings back its tokens.

Everything here is called by the lane's thread, with the lane's stream current, and never waits for the device (but for
pinned memory that a step three ahead still needs). A step whose sequences all take one token and sample is a *decode
step*: it replays a captured graph of the next larger number of rows. All others run launch by launch.
"""

import contextlib
from collections.abc import Sequence as Items
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from forebay.gpu.cuda_attention import Pages, Workspace
from forebay.gpu.cuda_decode import DecodeArrays, DecodeRows
from forebay.gpu.cuda_draws import FIELDS
from forebay.gpu.cuda_model import ModelOnDevice
from forebay.gpu.cuda_sampling import DeviceSampler
from forebay.gpu.cuda_staging import Results, Staging
from forebay.gpu.cuda_step import CudaStep, Planned
from forebay.gpu.errors import DeviceError, StepError
from forebay.gpu.sequences import Sequence
from forebay.transport.messages.common import Sampling
from forebay.transport.messages.steps import BLOCK_TOKENS, Work

BUCKETS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)
"""Rows of the captured decode steps, as far as a model's `max_sequences` goes."""


@dataclass(frozen=True, eq=False)
class Drawn:
    """Of the shares that sample, in the plan's order: who drew, and arrays that hold what once the step is over."""

    sequences: list[Sequence]
    tokens: NDArray[np.uint32]
    stopped: NDArray[np.uint8]


@dataclass(frozen=True, eq=False)
class _Captured:
    """A decode step, and the plan of its attention, which has to be that of every step that replays it."""

    graph: torch.cuda.CUDAGraph
    info: Items[int]


class Stepper:
    """`floats` is the lane's memory for attention (see AttentionShape.float_workspace_bytes). Without `graphs` decode
    steps, too, run launch by launch."""

    def __init__(self, shared: ModelOnDevice, floats: torch.Tensor, *, graphs: bool) -> None:
        self._shared = shared
        self._device = shared.last_tokens.values.device
        self._most_pages = -(-shared.max_context // BLOCK_TOKENS) * shared.max_sequences
        self._buckets = [bucket for bucket in BUCKETS if bucket < shared.max_sequences] + [shared.max_sequences]
        self._buckets = [bucket for bucket in self._buckets if bucket <= BUCKETS[-1]] if graphs else []
        tokens, rows = max(shared.step_tokens, shared.max_sequences), shared.max_sequences
        plan_bytes = shared.attention.shape.plan_bytes(tokens, rows, shared.processors)
        # Every array of a step launch by launch, its pages twice (of all sequences, and of those that sample).
        arrays = 16 * tokens + (56 + 8 * FIELDS) * rows + 8 * self._most_pages + 1024
        self._staging = Staging(arrays, plan_bytes, self._device)
        self._results = Results(rows, self._device)
        self._sampler = DeviceSampler(shared.vocabulary, shared.end_of_sequence, self._device, rows)
        self._workspaces = [
            Workspace(floats, torch.empty(plan_bytes, dtype=torch.uint8, device=self._device)) for _ in range(2)
        ]
        self._steady = np.arange(rows + 1, dtype=np.int32)
        self._steady_device = torch.arange(rows + 1, dtype=torch.int32, device=self._device)
        self._rows = DecodeRows(rows, self._most_pages, shared.last_tokens.slot, shared.last_tokens.nobody)
        self._placed: dict[tuple[int, int], DecodeArrays] = {}
        self._graphs: dict[tuple[int, bool, int], _Captured] = {}
        self._memory: Any = torch.cuda.graph_pool_handle() if self._buckets else None
        torch.cuda.current_stream(self._device).synchronize()  # the lane's stream does not wait for what was begun here

    # Steps -----------------------------------------------------------------------------------------------------------

    def run(self, works: Items[Work], sequences: list[Sequence], share: int = 0) -> Drawn | None:
        """Queues a step whose plan was checked; None if no share samples. Changes the sequences' block tables and how
        many tokens they know. Raises StepError, before anything is changed, for a step that is too large."""
        rows = len(works)
        tokens = sum([work.count for work in works])
        shared = self._shared
        if rows > shared.max_sequences or tokens > max(shared.step_tokens, shared.max_sequences):
            raise StepError(
                f"a step of {rows} sequences and {tokens} tokens; model {shared.name!r} was loaded with max_sequences "
                f"{shared.max_sequences} and step_tokens {shared.step_tokens}"
            )
        all_sample = True
        for work, sequence in zip(works, sequences, strict=True):
            if not work.sample:
                all_sample = False
            elif sequence.slot is None:
                shared.last_tokens.slot(sequence)
        for work, sequence in zip(works, sequences, strict=True):
            if work.blocks or work.kept != sequence.blocks:
                sequence.take_blocks(work)
        self._staging.begin()
        bucket = next((size for size in self._buckets if size >= rows), 0)
        if bucket and all_sample and tokens == rows:
            return self._decode(sequences, bucket, share)
        return self._launch(works, sequences)

    def _decode(self, sequences: list[Sequence], bucket: int, share: int) -> Drawn:
        rows, pages = self._rows.follow(sequences)
        arrays = self._decode_arrays(bucket, pages + bucket - rows)
        lengths = self._rows.write(arrays, bucket)
        warm = self._sampler.prepare(self._draws(sequences), arrays.settings.host)
        planned = self._send_decode(arrays, lengths)
        key = bucket, warm, share
        if key not in self._graphs:
            # A graph runs on the SMs of the stream that it was captured on: for a share of them when first needed.
            self._graphs[key] = _Captured(self._captured(arrays, planned, warm), planned.info)
        captured = self._graphs[key]
        if list(planned.info) != list(captured.info):
            raise DeviceError(
                f"the attention's plan for {bucket} rows changed from {list(captured.info)} to {list(planned.info)}: "
                f"the captured step cannot be used for it; this version of FlashInfer is not supported"
            )
        captured.graph.replay()
        return self._drawn(sequences, rows, bucket)

    def _decode_arrays(self, bucket: int, pages: int) -> DecodeArrays:
        """At the same places for the same bucket, whatever the number of pages."""
        key = bucket, self._staging.turn
        if key not in self._placed:
            array = self._staging.array
            most = self._most_pages + bucket
            self._placed[key] = DecodeArrays(
                rows=array(np.int64, bucket),
                slots=array(np.int64, bucket),
                settings=array(np.int64, FIELDS, bucket),
                tokens=array(np.int32, bucket),
                positions=array(np.int32, bucket),
                starts=array(np.int32, bucket + 1),
                last_tokens=array(np.int32, bucket),
                indices=array(np.int32, most),
            )
        arrays = self._placed[key]
        self._staging.use(arrays.indices, pages)
        return arrays

    def _send_decode(self, arrays: DecodeArrays, lengths: NDArray[np.int32]) -> Planned:
        rows = len(lengths)
        workspace = self._workspaces[0]
        self._staging.send()
        info = self._shared.attention.plan(
            self._steady[: rows + 1], arrays.starts.host, lengths, workspace, self._staging.plan(0), graph=True
        )
        self._staging.sent()
        device = (arrays.starts.device, arrays.last_tokens.device, arrays.indices.device)
        return Planned(info, Pages(self._steady_device[: rows + 1], *device), workspace, causal=False)

    def _decode_launches(self, arrays: DecodeArrays, planned: Planned, warm: bool) -> None:
        """What a graph holds."""
        shared = self._shared
        last = shared.last_tokens.values[arrays.slots.device]
        tokens = torch.where(arrays.tokens.device >= 0, arrays.tokens.device, last)
        step = CudaStep(
            arrays.positions.device, arrays.rows.device, None, shared.layers, shared.attention, planned
        )  # fmt: skip
        logits = shared.model.logits(tokens, step)
        assert logits is not None, "all rows sample"
        self._choose(logits, arrays.settings.device, arrays.slots.device, warm)

    def _launch(self, works: Items[Work], sequences: list[Sequence]) -> Drawn | None:
        array = self._staging.array
        counts = np.array([work.count for work in works], np.int32)
        starts = np.array([work.start for work in works], np.int32)
        lengths = starts + counts
        queries = np.zeros(len(works) + 1, np.int32)
        np.cumsum(counts, out=queries[1:])
        total = int(queries[-1])
        sampling = [i for i, work in enumerate(works) if work.sample]
        drawing = [sequences[i] for i in sampling]
        rows, slots = array(np.int64, total), array(np.int64, len(sampling))
        settings = array(np.int64, FIELDS, len(sampling))
        tokens, positions = array(np.int32, total), array(np.int32, total)
        slot = self._shared.last_tokens.slot
        late: list[tuple[int, int]] = []
        begin = 0
        for work, sequence in zip(works, sequences, strict=True):
            end = begin + work.count
            there = min(end, begin + sequence.landed - work.start)
            tokens.host[begin:there] = sequence.tokens[work.start : work.start + there - begin]
            if there < end:
                late.append((end - 1, slot(sequence)))
                tokens.host[end - 1] = 0
            begin = end
        warm = self._sampler.prepare(self._draws(drawing), settings.host)
        slots.host[:] = [slot(sequence) for sequence in drawing]
        late_rows, late_slots = (array(np.int64, len(late)) for _ in range(2))
        if late:
            late_rows.host[:], late_slots.host[:] = zip(*late, strict=True)
        kept = array(np.int64, len(sampling))
        kept.host[:] = queries[1:][sampling] - 1
        pages = self._pages(queries, lengths, sequences)
        at = np.arange(total, dtype=np.int32) + np.repeat(starts - queries[:-1], counts)
        positions.host[:] = at
        blocks = pages.blocks[np.repeat(pages.starts[:-1], counts) + at // BLOCK_TOKENS]
        np.add(blocks.astype(np.int64) * BLOCK_TOKENS, at % BLOCK_TOKENS, out=rows.host)
        kept_lengths, kept_pages = lengths[sampling], None
        only_some = len(sampling) < total
        if only_some and sampling:
            kept_pages = self._pages(self._steady[: len(sampling) + 1], kept_lengths, drawing)
        self._staging.send()
        planned = self._planned(queries, lengths, pages, 0)
        planned_kept = kept_pages and self._planned(self._steady[: len(sampling) + 1], kept_lengths, kept_pages, 1)
        self._staging.sent()
        step = CudaStep(
            positions.device, rows.device, kept.device if only_some else None, self._shared.layers,
            self._shared.attention, planned, planned_kept or None,
        )  # fmt: skip
        if late:
            found = self._shared.last_tokens.values[late_slots.device]
            tokens.device.index_copy_(0, late_rows.device, found)
        logits = self._shared.model.logits(tokens.device, step)
        if logits is None:
            return None
        self._choose(logits, settings.device, slots.device, warm)
        return self._drawn(drawing, len(drawing), len(drawing))

    def _pages(self, queries: NDArray[np.int32], lengths: NDArray[np.int32], sequences: list[Sequence]) -> "_HostPages":
        array = self._staging.array
        count = len(sequences)
        needed = -(-lengths // BLOCK_TOKENS)
        placed = array(np.int32, count + 1), array(np.int32, count + 1), array(np.int32, count)
        for_queries, starts, last = placed
        for_queries.host[:] = queries
        starts.host[0] = 0
        np.cumsum(needed, out=starts.host[1:])
        last.host[:] = (lengths - 1) % BLOCK_TOKENS + 1
        indices = array(np.int32, int(starts.host[-1]))
        blocks = [sequence.table[:used] for sequence, used in zip(sequences, needed.tolist(), strict=True)]
        np.concatenate(blocks, out=indices.host, casting="same_kind")
        device = Pages(for_queries.device, starts.device, last.device, indices.device)
        return _HostPages(starts.host, indices.host, device)

    def _planned(
        self, queries: NDArray[np.int32], lengths: NDArray[np.int32], pages: "_HostPages", number: int
    ) -> Planned:
        workspace = self._workspaces[number]
        attention = self._shared.attention
        info = attention.plan(queries, pages.starts, lengths, workspace, self._staging.plan(number), graph=False)
        return Planned(info, pages.device, workspace, causal=True)

    # What is drawn ---------------------------------------------------------------------------------------------------

    @staticmethod
    def _draws(sequences: list[Sequence]) -> list[tuple[Sampling, int]]:
        """As Draw has them, which takes longer to make."""
        return [(sequence.sampling, sequence.known - sequence.prompt_tokens) for sequence in sequences]

    def _choose(self, logits: torch.Tensor, settings: torch.Tensor, slots: torch.Tensor, warm: bool) -> None:
        choose = self._sampler.run if warm else self._sampler.run_greedy
        tokens, stopped = choose(logits, settings)
        self._shared.last_tokens.values.index_copy_(0, slots, tokens)
        for place, found in zip(self._results.places(len(logits)), (tokens, stopped), strict=True):
            place.copy_(found)

    def _drawn(self, sequences: list[Sequence], rows: int, placed: int) -> Drawn:
        """Fetches what was drawn for the first `rows` of `placed` rows."""
        tokens, stopped = self._results.fetch(placed)
        for sequence in sequences:
            sequence.draw()
        return Drawn(sequences, tokens[:rows], stopped[:rows])

    # Graphs ----------------------------------------------------------------------------------------------------------

    def capture(self, stream: torch.cuda.Stream) -> None:
        """Captures the decode steps, the largest first, so that the smaller ones need no further memory. The stream is
        nobody else's. Each step runs once before: kernels are built and libraries make up their minds then. Meanwhile
        other models' steps may run in the lane, so that is done with memory of its own."""
        with torch.inference_mode(), torch.cuda.stream(stream):
            apart = Workspace(torch.empty_like(self._workspaces[0].floats), self._workspaces[0].plan)
            for bucket in reversed(self._buckets):
                self._staging.begin()
                arrays = self._decode_arrays(bucket, bucket)
                self._rows.follow([])
                lengths = self._rows.write(arrays, bucket)
                arrays.settings.host[:] = 0
                planned = self._send_decode(arrays, lengths)
                for warm in (True, False):
                    self._decode_launches(arrays, replace(planned, workspace=apart), warm)
                    self._graphs[bucket, warm, 0] = _Captured(self._captured(arrays, planned, warm), planned.info)
            stream.synchronize()

    def _captured(self, arrays: DecodeArrays, planned: Planned, warm: bool) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        # Other threads may call what a capture forbids: it concerns this thread alone.
        graph.capture_begin(pool=self._memory, capture_error_mode="thread_local")
        try:
            self._decode_launches(arrays, planned, warm)
        except BaseException:
            with contextlib.suppress(RuntimeError):
                graph.capture_end()
            raise
        graph.capture_end()
        return graph


@dataclass(frozen=True, eq=False)
class _HostPages:
    starts: NDArray[np.int32]
    blocks: NDArray[np.int32]
    device: Pages
