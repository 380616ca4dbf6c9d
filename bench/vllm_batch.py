"""One batch through vLLM, run by bench.engine with the Python of an environment that has it (and nothing of ours).

Arguments: a JSON file with model, dtype, output, prompts (token ids), eager and dummy, and the file that gets start_s,
prefill_s and decode_s. A first batch warms up. Prefill is a run of the batch with one token each; decode is what the
same batch with all its tokens takes beyond that. With `eager` compilation and graphs are off: on two cores of a CPU
they take minutes. With `dummy` weights are made up, and no tokenizer is needed.
"""

import json
import sys
import time
from pathlib import Path


def main() -> None:
    from vllm import LLM, SamplingParams

    wish = json.loads(Path(sys.argv[1]).read_text())
    prompts = [{"prompt_token_ids": prompt} for prompt in wish["prompts"]]
    longest = max(map(len, wish["prompts"])) + wish["output"] + 1
    begin = time.perf_counter()
    model = LLM(
        wish["model"],
        dtype=wish["dtype"],
        max_model_len=longest,
        max_num_seqs=len(prompts),
        enable_prefix_caching=False,
        enforce_eager=wish["eager"],
        # The process that started this one still has its CUDA context, and others may.
        **({} if wish["eager"] else {"gpu_memory_utilization": 0.85}),
        **({"load_format": "dummy", "skip_tokenizer_init": True} if wish["dummy"] else {}),
    )

    start = time.perf_counter() - begin

    def run(tokens: int) -> float:
        sampling = SamplingParams(
            temperature=0.0,
            max_tokens=tokens,
            # Without a tokenizer vLLM knows no end of sequence to hold back, and refuses to.
            min_tokens=0 if wish["dummy"] else tokens,
            ignore_eos=True,
            detokenize=not wish["dummy"],
        )
        begin = time.perf_counter()
        outputs = model.generate(prompts, sampling, use_tqdm=False)
        took = time.perf_counter() - begin
        assert all(len(output.outputs[0].token_ids) == tokens for output in outputs)
        return took

    run(wish["output"] if not wish["eager"] else 2)
    prefill = run(1)
    total = run(wish["output"])
    Path(sys.argv[2]).write_text(json.dumps({"start_s": start, "prefill_s": prefill, "decode_s": total - prefill}))


if __name__ == "__main__":
    main()
