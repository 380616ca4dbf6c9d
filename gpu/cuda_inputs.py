"""What the steps of a lane read on the device, and how it gets there: arrays are filled on the host, sent in one copy,
and attention is planned. Nothing here launches a kernel or waits for one.
"""

from collections.abc import Callable
from collections.abc import Sequence as Items
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray

from forebay.gpu.cuda_attention import Pages, Workspace
from forebay.gpu.cuda_decode import DecodeArrays, DecodeRows
from forebay.gpu.cuda_draws import FIELDS
from forebay.gpu.cuda_graphs import Captures
from forebay.gpu.cuda_mixed import Makeup, MixedArrays, MixedRows, StepShape
from forebay.gpu.cuda_model import ModelOnDevice
from forebay.gpu.cuda_staging import Staged, Staging
from forebay.gpu.cuda_step import Planned
from forebay.gpu.sequences import Sequence
from forebay.transport.messages.common import Sampling
from forebay.transport.messages.steps import BLOCK_TOKENS, Work

Settings = Callable[[Items[tuple[Sampling, int]], NDArray[np.int64]], bool]
"""DeviceSampler.prepare."""


@dataclass(frozen=True, eq=False)
class Inputs:
    """What a step's launches read, on the device. `tokens` [T] may be IN_FLIGHT: the last one of the slot in
    `token_slots` [T]. Draws go to `slots`, and some of them are not greedy if it is `warm`; `kept`, `positions` and
    `rows` as in CudaStep."""

    tokens: torch.Tensor
    token_slots: torch.Tensor
    positions: torch.Tensor
    rows: torch.Tensor
    kept: torch.Tensor | None
    slots: torch.Tensor
    settings: torch.Tensor
    warm: bool
    planned: Planned
    planned_kept: Planned | None = None

    @property
    def info(self) -> list[int]:
        """Of the attention's plans."""
        return [*self.planned.info, *(self.planned_kept.info if self.planned_kept else ())]

    def with_floats(self, floats: torch.Tensor) -> "Inputs":
        """With the attention's partial results elsewhere."""

        def moved(planned: Planned) -> Planned:
            return replace(planned, workspace=Workspace(floats, planned.workspace.plan))

        kept = self.planned_kept
        return replace(self, planned=moved(self.planned), planned_kept=None if kept is None else moved(kept))


class StepArrays:
    """The memory of a lane's steps for one model. `floats` is the lane's own for attention (see Captures.float_bytes),
    `settings` writes how tokens are drawn."""

    def __init__(self, shared: ModelOnDevice, floats: torch.Tensor, captures: Captures, settings: Settings) -> None:
        self._attention = shared.attention
        self._settings = settings
        device, rows = floats.device, shared.max_sequences
        self._most_pages = -(-shared.max_context // BLOCK_TOKENS) * rows
        largest = captures.mixed.largest if captures.mixed else StepShape(0, 0, 0)
        tokens, sequences = max(shared.step_tokens, rows, largest.tokens), max(rows, largest.sequences)
        plan_bytes = shared.attention.shape.plan_bytes(tokens, sequences, shared.processors)
        # Every array of a step (see MixedArrays), and a block for each row that fills up a decode step.
        arrays = 24 * tokens + (36 + 8 * FIELDS) * sequences + 4 * self._most_pages + 1024
        self._staging = Staging(arrays, plan_bytes, device)
        self.workspaces = [Workspace(floats, torch.empty(plan_bytes, dtype=torch.uint8, device=device)) for _ in (0, 1)]
        self._steady = np.arange(rows + 1, dtype=np.int32)
        self._steady_device = torch.arange(rows + 1, dtype=torch.int32, device=device)
        slot, nobody = shared.last_tokens.slot, shared.last_tokens.nobody
        self.decode_rows = DecodeRows(rows, self._most_pages, slot, nobody)
        self._mixed_rows = MixedRows(self.decode_rows, slot, nobody)
        self._decodes: dict[tuple[int, int], DecodeArrays] = {}
        self._mixed: dict[tuple[StepShape, int], MixedArrays] = {}

    def decode(self, sequences: list[Sequence], bucket: int) -> Inputs:
        """A decode step of these, filled up to `bucket` rows. Waits until the pinned memory is free."""
        self._staging.begin()
        rows, pages = self.decode_rows.follow(sequences)
        arrays = self._decode_arrays(bucket, pages + bucket - rows)
        lengths = self.decode_rows.write(arrays, bucket)
        warm = self._settings(_draws(sequences), arrays.settings.host)
        return self._send_decode(arrays, lengths, warm)

    def mixed(
        self,
        step: Makeup,
        works: Items[Work],
        sequences: list[Sequence],
        drawing: list[Sequence],
        shape: StepShape | None,
    ) -> Inputs:
        """A step of any make-up, filled up to `shape`, if it is to be captured. `drawing` are those that sample. Waits
        until the pinned memory is free."""
        self._staging.begin()
        pages = step.all_pages
        arrays = self._mixed_arrays(shape, pages) if shape else self._arrays_of(step.shape, pages)
        lengths = self._mixed_rows.write(arrays, step, works, sequences)
        warm = self._settings(_draws(drawing), arrays.settings.host)
        return self._send_mixed(arrays, lengths, warm, step, shape)

    def _decode_arrays(self, bucket: int, pages: int) -> DecodeArrays:
        """At the same places for the same bucket, whatever the number of pages."""
        key = bucket, self._staging.turn
        if key not in self._decodes:
            array = self._staging.array
            self._decodes[key] = DecodeArrays(
                rows=array(np.int64, bucket),
                slots=array(np.int64, bucket),
                settings=array(np.int64, FIELDS, bucket),
                tokens=array(np.int32, bucket),
                positions=array(np.int32, bucket),
                starts=array(np.int32, bucket + 1),
                last_tokens=array(np.int32, bucket),
                indices=array(np.int32, self._most_pages + bucket),
            )
        arrays = self._decodes[key]
        self._staging.use(arrays.indices, pages)
        return arrays

    def _mixed_arrays(self, shape: StepShape, pages: int) -> MixedArrays:
        """As _decode_arrays, for a captured shape."""
        key = shape, self._staging.turn
        if key not in self._mixed:
            self._mixed[key] = self._arrays_of(shape, self._most_pages)
        arrays = self._mixed[key]
        self._staging.use(arrays.indices, pages)
        return arrays

    def _arrays_of(self, shape: StepShape, pages: int) -> MixedArrays:
        array = self._staging.array
        return MixedArrays(
            rows=array(np.int64, shape.tokens),
            token_slots=array(np.int64, shape.tokens),
            kept=array(np.int64, shape.draws),
            slots=array(np.int64, shape.draws),
            settings=array(np.int64, FIELDS, shape.draws),
            tokens=array(np.int32, shape.tokens),
            positions=array(np.int32, shape.tokens),
            queries=array(np.int32, shape.sequences + 1),
            kept_queries=array(np.int32, shape.sequences + 1),
            starts=array(np.int32, shape.sequences + 1),
            last_tokens=array(np.int32, shape.sequences),
            indices=array(np.int32, pages),
        )

    def _send_decode(self, arrays: DecodeArrays, lengths: NDArray[np.int32], warm: bool) -> Inputs:
        rows = len(lengths)
        workspace = self.workspaces[0]
        self._staging.send()
        info = self._attention.plan(
            self._steady[: rows + 1], arrays.starts.host, lengths, workspace, self._staging.plan(0), graph=True
        )
        self._staging.sent()
        device = (arrays.starts.device, arrays.last_tokens.device, arrays.indices.device)
        pages = Pages(self._steady_device[: rows + 1], *device)
        return Inputs(
            tokens=arrays.tokens.device,
            token_slots=arrays.slots.device,
            positions=arrays.positions.device,
            rows=arrays.rows.device,
            kept=None,
            slots=arrays.slots.device,
            settings=arrays.settings.device,
            warm=warm,
            planned=Planned(info, pages, workspace, causal=False),
        )

    def _send_mixed(
        self, arrays: MixedArrays, lengths: NDArray[np.int32], warm: bool, step: Makeup, shape: StepShape | None
    ) -> Inputs:
        """`shape` is that of a captured step, None for one that runs launch by launch."""
        self._staging.send()
        sequences = len(lengths)
        planned = self._planned(0, arrays, arrays.queries, lengths, shape.tokens if shape else None)
        all_kept = shape is None and step.shape.draws == step.shape.tokens
        planned_kept = None
        if not all_kept and len(arrays.kept.host):
            # The same sequences, of which those that do not sample have no query. A graph has room for all.
            room = sequences if shape else None
            planned_kept = self._planned(1, arrays, arrays.kept_queries, lengths, room)
        self._staging.sent()
        return Inputs(
            tokens=arrays.tokens.device,
            token_slots=arrays.token_slots.device,
            positions=arrays.positions.device,
            rows=arrays.rows.device,
            kept=None if all_kept else arrays.kept.device,
            slots=arrays.slots.device,
            settings=arrays.settings.device,
            warm=warm,
            planned=planned,
            planned_kept=planned_kept,
        )

    def _planned(
        self, number: int, arrays: MixedArrays, queries: Staged, lengths: NDArray[np.int32], room: int | None
    ) -> Planned:
        workspace, pinned = self.workspaces[number], self._staging.plan(number)
        info = self._attention.plan(
            queries.host, arrays.starts.host, lengths, workspace, pinned, graph=room is not None, room=room
        )
        pages = Pages(queries.device, arrays.starts.device, arrays.last_tokens.device, arrays.indices.device)
        return Planned(info, pages, workspace, causal=True)


def _draws(sequences: list[Sequence]) -> list[tuple[Sampling, int]]:
    """As Draw has them, which takes longer to make."""
    return [(sequence.sampling, sequence.known - sequence.prompt_tokens) for sequence in sequences]
