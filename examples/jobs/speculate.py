"""Generate with a draft model, as a user's job with its own configuration file does.

    python speculate.py CONFIG.yaml

The file has the sections `engine:` and `speculative_decoding:`.
"""

import json
import sys
from pathlib import Path

import yaml
from vllm import LLM, SamplingParams

DRAFTED, ACCEPTED = (f"vllm:spec_decode_num_{what}_tokens" for what in ("draft", "accepted"))


def main() -> None:
    config = yaml.safe_load(Path(sys.argv[1]).read_text())
    speculation = config.get("speculative_decoding")
    draft = {
        "method": "draft_model",
        "model": "./draft",
        "num_speculative_tokens": speculation["num_tokens"] if speculation else 0,
    }
    llm = LLM(
        "./target",
        skip_tokenizer_init=True,
        dtype="float32",
        enforce_eager=True,
        max_num_seqs=4,
        disable_log_stats=False,
        speculative_config=draft if speculation else None,
        **config["engine"],
    )
    prompts = [{"prompt_token_ids": list(range(start, start + 40))} for start in (10, 90, 170)]
    parameters = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True, detokenize=False)
    outputs = llm.generate(prompts, parameters, use_tqdm=False)
    counted = {m.name: m.value for m in llm.get_metrics() if m.name in (DRAFTED, ACCEPTED)}
    result = {
        "tokens": [output.outputs[0].token_ids for output in outputs],
        "drafted": counted.get(DRAFTED, 0),
        "accepted": counted.get(ACCEPTED, 0),
        "max_model_len": llm.llm_engine.model_config.max_model_len,
        "utilization": llm.llm_engine.vllm_config.cache_config.gpu_memory_utilization,
    }
    print("RESULT", json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
