"""Run by the vLLM environment's Python: start each model in process and print what vLLM says of its
KV cache, a JSON line each.

python benchmarks/support/kv_engine.py MODELS.json [NAME …]

No model is started in bfloat16: vLLM's CPU attention then takes AMX, which some virtual machines
show and do not enable, and the process dies with SIGILL. They are float16, and float32 in the three
families that vLLM refuses in float16.
"""

import contextlib
import gc
import json
import os
import sys
import tempfile
from pathlib import Path

os.environ.update(
    VLLM_ENABLE_V1_MULTIPROCESSING="0",
    HF_HUB_OFFLINE="1",
    VLLM_LOGGING_LEVEL="ERROR",
    VLLM_CPU_KVCACHE_SPACE="1",
)

POOL_BYTES = 1 << 30
STEP_TOKENS = 512
SEQS = 4
LONGEST_TOKENS = 4096


def start(folder: str, config: dict, max_model_len: int) -> dict:
    from vllm import LLM

    llm = LLM(
        folder,
        load_format="dummy",
        skip_tokenizer_init=True,
        enforce_eager=True,
        distributed_executor_backend="uni",
        max_num_seqs=SEQS,
        max_num_batched_tokens=STEP_TOKENS,
        max_model_len=max_model_len,
        dtype=config["torch_dtype"],
    )
    cache = llm.llm_engine.vllm_config.cache_config
    answer = {
        "blocks": cache.num_gpu_blocks,
        "tokens": cache.kv_cache_size_tokens,
        "max_concurrency": cache.kv_cache_max_concurrency,
        "pool_bytes": POOL_BYTES,
        "max_model_len": max_model_len,
        "max_num_batched_tokens": STEP_TOKENS,
        "max_num_seqs": SEQS,
    }
    llm.llm_engine.engine_core.shutdown()
    return answer


def main() -> None:
    models = json.loads(Path(sys.argv[1]).read_text())
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever an engine prints is no answer
    from vllm.distributed import cleanup_dist_env_and_memory
    from vllm.model_executor.models import registry

    registry._run_in_subprocess = lambda look: (
        look()
    )  # another process would import vLLM again, for each architecture

    for name in sys.argv[2:] or models:
        config = models[name]
        longest = (
            config.get("max_position_embeddings")
            or config.get("n_positions")
            or config.get("seq_length")
            or LONGEST_TOKENS
        )
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "config.json").write_text(json.dumps(config))
            try:
                answer = start(folder, config, min(LONGEST_TOKENS, longest))
            except Exception as error:  # noqa: BLE001
                # one model that does not start must not keep the others from it
                answer = {"error": f"{type(error).__name__}: {error}"[:300]}
        answers.write(json.dumps({"name": name, **answer}) + "\n")
        answers.flush()
        gc.collect()
        with contextlib.suppress(Exception):
            cleanup_dist_env_and_memory()


if __name__ == "__main__":
    main()
