"""Parts that messages in several directions carry."""

from typing import Literal

from forebay.transport.messages.base import Message, Part

FinishReason = Literal["stop", "length", "aborted", "failed"]
"""How a request ended: end-of-sequence token, `max_tokens` reached, given up by its client, or an error."""


class Sampling(Part, frozen=True):
    """How to choose tokens. `temperature` 0 is greedy. The draw for output token i depends on (`seed`, i) alone, so
    a request resumed elsewhere goes on with the same text."""

    max_tokens: int
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0
    min_tokens: int = 0
    ignore_eos: bool = False


class Targets(Part, frozen=True):
    """How fast one model's requests are to be answered, in seconds: the first token, and each one after it. 0: five
    times what it takes alone (PATIENCE in sched/policy.py)."""

    ttft_s: float = 0.0
    tpot_s: float = 0.0


class DeviceSettings(Part, frozen=True):
    """What a worker may use of its device, and how it shares it. `memory` is the KV pool's capacity in bytes; `threads`
    is the number of CPU threads of a step (0: leave the library's own choice). `lend`: it lends what its pool does not
    need; `spill_bytes` of host memory take the blocks of preempted sequences; `fairness` chooses among the sequences of
    a model (`fcfs`, `cfs`, `vtc`), where tenants have `weights` (1 for those not named). `partition`: how prefills and
    decodes share its SMs (sched/partition.py; always `none` on a CPU device); `auto` keeps to the `targets` of each
    model and reads a cost file (`costs`, absolute; empty: it learns from steps). `weights_memory`: bytes of weights
    that are there at once, 0: those of all models; `weights_host`: bytes of the host for those that are away, 0: no
    bound; `weights_borrow`: they go to memory that other devices lend, and to the host where there is none. `reserve`:
    bytes of the device that are to stay free; where others take them the pool gives slabs back (0: never)."""

    memory: int
    slab_bytes: int = 256 << 20
    threads: int = 0
    policy: str = "adbs"
    prefix_cache: bool = True
    lend: bool = False
    spill_bytes: int = 0
    fairness: str = "fcfs"
    weights: dict[str, float] = {}
    partition: str = "auto"
    targets: dict[str, Targets] = {}
    costs: str = ""
    weights_memory: int = 0
    weights_host: int = 0
    weights_borrow: bool = False
    reserve: int = 0


class ModelSpec(Part, frozen=True):
    """A model to load. `path` is a folder in Hugging Face's layout (absolute). `max_context` in tokens, 0: as many as
    the model was trained for. `max_sequences` bounds how many of its sequences run at once on one device,
    `step_tokens` how many tokens one step may process (prefill is cut into chunks of that size). `popularity`: the
    share of requests that it is expected to get, relative to other models. `load_format`: "auto" reads the weights,
    "dummy" makes small random ones of config.json's shapes on the device, the same each time, for benchmarks."""

    name: str
    path: str
    dtype: str = "float32"
    max_context: int = 0
    max_sequences: int = 64
    step_tokens: int = 512
    popularity: float = 1.0
    load_format: str = "auto"


class Heartbeat(Message, frozen=True):
    """I am alive. Anything else that a peer sends says the same."""
