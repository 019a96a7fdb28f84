"""A chat of two turns with vLLM: the second loads what the first computed. Run it twice: so does the first.

python examples/vllm/two_turn_chat.py MODEL
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

from vllm import LLM, SamplingParams

DOCUMENT = " ".join(f"Day {i}: the harbour master counted {3 * i} boats before noon." for i in range(60))
QUESTIONS = ["How many boats came on day 7?", "And on the day after?"]


def main(model: str) -> None:
    llm = LLM(
        model,
        enable_prefix_caching=False,  # so that every hit below is the connector's
        enforce_eager=True,
        max_model_len=4096,
        kv_transfer_config={
            "kv_connector": "LMCacheCoreConnector",
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": {"config": str(Path(__file__).with_name("cache.yaml"))},
        },
    )
    chat = DOCUMENT
    for question in QUESTIONS:
        chat += f"\nQuestion: {question}\nAnswer:"
        started = time.perf_counter()
        [output] = llm.generate(chat, SamplingParams(temperature=0, max_tokens=24), use_tqdm=False)
        seconds = time.perf_counter() - started
        num_tokens = len(output.prompt_token_ids or ())
        print(f"{output.num_cached_tokens} of {num_tokens} prompt tokens loaded, {seconds:.2f} s in all")
        chat += output.outputs[0].text


if __name__ == "__main__":
    main(sys.argv[1])
