"""One batch through vLLM, run by bench.engine with the Python of an environment that has it (and nothing of ours).

Arguments: a JSON file with model, dtype, output and prompts (token ids), and the file that gets prefill_s and decode_s.
Prefill is a run of the batch with one token each; decode is what the same batch with all its tokens takes beyond that.
Compilation is off: on two cores it takes minutes.
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
    model = LLM(
        wish["model"],
        dtype=wish["dtype"],
        max_model_len=longest,
        max_num_seqs=len(prompts),
        enable_prefix_caching=False,
        enforce_eager=True,
    )

    def run(tokens: int) -> float:
        sampling = SamplingParams(temperature=0.0, max_tokens=tokens, min_tokens=tokens, ignore_eos=True)
        begin = time.perf_counter()
        outputs = model.generate(prompts, sampling, use_tqdm=False)
        took = time.perf_counter() - begin
        assert all(len(output.outputs[0].token_ids) == tokens for output in outputs)
        return took

    run(2)
    prefill = run(1)
    total = run(wish["output"])
    Path(sys.argv[2]).write_text(json.dumps({"prefill_s": prefill, "decode_s": total - prefill}))


if __name__ == "__main__":
    main()
