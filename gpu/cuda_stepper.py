"""One model on one lane of a CUDA device: takes a checked step from the host to the stream, and brings back its tokens.

Everything here is called by the lane's thread, with the lane's stream current, and never waits for the device (but for
pinned memory that a step three ahead still needs). A step whose sequences all take one token and sample is a *decode
step*: it replays a captured graph of the next larger number of rows. A *mixed step* is any other; if it is small it
replays a graph too, of the next larger shape, and otherwise runs launch by launch.
"""

from collections.abc import Hashable
from collections.abc import Sequence as Items
from dataclasses import dataclass, replace

import numpy as np
import structlog
import torch
from numpy.typing import NDArray

from forebay.gpu.cuda_graphs import Captures, StepGraphs
from forebay.gpu.cuda_inputs import Inputs, StepArrays
from forebay.gpu.cuda_mixed import makeup
from forebay.gpu.cuda_model import ModelOnDevice
from forebay.gpu.cuda_sampling import DeviceSampler
from forebay.gpu.cuda_staging import Results
from forebay.gpu.cuda_step import CudaStep
from forebay.gpu.errors import StepError, is_lack
from forebay.gpu.sequences import Sequence
from forebay.transport.messages.steps import Work


@dataclass(frozen=True, eq=False)
class Drawn:
    """Of the shares that sample, in the plan's order: who drew, and arrays that hold what once the step is over."""

    sequences: list[Sequence]
    tokens: NDArray[np.uint32]
    stopped: NDArray[np.uint8]


class Stepper:
    """`floats` is the lane's memory for attention (see Captures.float_bytes)."""

    def __init__(self, shared: ModelOnDevice, floats: torch.Tensor, captures: Captures) -> None:
        self._shared = shared
        device, rows = shared.last_tokens.values.device, shared.max_sequences
        self._results = Results(rows, device)
        self._sampler = DeviceSampler(shared.vocabulary, shared.end_of_sequence, device, rows)
        self._arrays = StepArrays(shared, floats, captures, self._sampler.prepare)
        self.captures = captures
        """May be changed between steps."""
        self.graphs = StepGraphs()
        self._stream: torch.cuda.Stream | None = None
        self._ran: set[Hashable] = set()
        self._too_large: set[Hashable] = set()
        torch.cuda.current_stream(device).synchronize()  # the lane's stream does not wait for what was begun here

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
        if all_sample and tokens == rows:
            bucket = next((size for size in self.captures.decodes if size >= rows), 0)
            if bucket:
                return self._decode(sequences, bucket, share)
        return self._mixed(works, sequences, share)

    def forget_rows(self) -> None:
        """Before a step that failed half-way is run once more."""
        self._arrays.decode_rows.forget()

    def _decode(self, sequences: list[Sequence], bucket: int, share: int) -> Drawn:
        inputs = self._arrays.decode(sequences, bucket)
        key = "decode", bucket, inputs.warm, share
        if key not in self.graphs:
            # A graph runs on the SMs of the stream that it was captured on: for a share of them when first needed.
            self.graphs.capture(key, inputs.info, lambda: self._launches(inputs))
        self.graphs.replay(key, inputs.info)
        return self._drawn(sequences, inputs)

    def _mixed(self, works: Items[Work], sequences: list[Sequence], share: int) -> Drawn | None:
        step = makeup(works)
        shapes = self.captures.mixed
        shape = shapes.find(step) if shapes and not share else None
        drawing = [sequence for work, sequence in zip(works, sequences, strict=True) if work.sample]
        inputs = self._arrays.mixed(step, works, sequences, drawing, shape)
        if shape is None or not self._replayed(("mixed", shape, inputs.warm), inputs):
            self._launches(inputs)
        return self._drawn(drawing, inputs) if drawing else None

    def _replayed(self, key: Hashable, inputs: Inputs) -> bool:
        """Whether there is a graph for this step. It is captured when it is needed for the second time: what is rare
        does not take time and memory for nothing, and the first time libraries made up their minds."""
        if key not in self.graphs:
            if key not in self._ran or key in self._too_large:
                self._ran.add(key)
                return False
            try:
                self.graphs.capture(key, inputs.info, lambda: self._launches(inputs), self._stream)
            except Exception as error:
                if not is_lack(error):
                    raise
                self._too_large.add(key)
                structlog.get_logger().warning(
                    "no memory to capture a step: it runs launch by launch", model=self._shared.name, step=key,
                    error=str(error),
                )  # fmt: skip
                return False
        self.graphs.replay(key, inputs.info)
        return True

    def _launches(self, inputs: Inputs) -> None:
        """What a graph holds."""
        shared = self._shared
        last = shared.last_tokens.values[inputs.token_slots]
        tokens = torch.where(inputs.tokens >= 0, inputs.tokens, last)
        step = CudaStep(
            inputs.positions, inputs.rows, inputs.kept, shared.layers, shared.attention, inputs.planned,
            inputs.planned_kept,
        )  # fmt: skip
        logits = shared.model.logits(tokens, step)
        if logits is None:
            return
        choose = self._sampler.run if inputs.warm else self._sampler.run_greedy
        drawn, stopped = choose(logits, inputs.settings)
        shared.last_tokens.values.index_copy_(0, inputs.slots, drawn)
        for place, found in zip(self._results.places(len(logits)), (drawn, stopped), strict=True):
            place.copy_(found)

    def _drawn(self, sequences: list[Sequence], inputs: Inputs) -> Drawn:
        """Fetches what was drawn; what fills up a step lies behind."""
        tokens, stopped = self._results.fetch(len(inputs.slots))
        rows = len(sequences)
        for sequence in sequences:
            sequence.draw()
        return Drawn(sequences, tokens[:rows], stopped[:rows])

    def capture(self, stream: torch.cuda.Stream) -> None:
        """Captures the largest mixed step, whose memory the others use again, and all decode steps, the largest first.
        The stream is nobody else's, and is kept for those that are captured later."""
        self._stream = stream
        with torch.inference_mode(), torch.cuda.stream(stream):
            # Meanwhile other models' steps may run in the lane.
            floats = torch.empty_like(self._arrays.workspaces[0].floats)
            if self.captures.mixed:
                shape = self.captures.mixed.largest
                inputs = self._arrays.mixed(makeup(()), (), [], [], shape)
                self._capture_now(("mixed", shape, True), replace(inputs, warm=True), floats)
            for bucket in reversed(self.captures.decodes):
                inputs = self._arrays.decode([], bucket)
                for warm in (True, False):
                    self._capture_now(("decode", bucket, warm, 0), replace(inputs, warm=warm), floats)
            stream.synchronize()

    def _capture_now(self, key: Hashable, inputs: Inputs, floats: torch.Tensor) -> None:
        """After it has run once: kernels are built and libraries make up their minds then."""
        self._launches(inputs.with_floats(floats))
        self.graphs.capture(key, inputs.info, lambda: self._launches(inputs))
