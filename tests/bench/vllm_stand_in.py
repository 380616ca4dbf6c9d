"""`python -m tests.bench.vllm_stand_in MODEL NAME PORT`: a Forebay with one model, as a vLLM has."""

import os
import sys
import tempfile

import yaml


def main() -> None:
    folder, name, port = sys.argv[1:]
    with tempfile.NamedTemporaryFile("w", suffix=".yaml", dir=os.environ.get("XDG_RUNTIME_DIR"), delete=False) as file:
        yaml.safe_dump(
            {
                "devices": [{"device": "cpu:0", "memory": "128MiB", "threads": 1}],
                "models": [{"name": name, "path": folder, "placement": ["cpu:0"], "max_context": 128}],
            },
            file,
        )
    os.execv(sys.executable, [sys.executable, "-m", "forebay.runtime.scheduler", file.name, "--port", port])


if __name__ == "__main__":
    main()
