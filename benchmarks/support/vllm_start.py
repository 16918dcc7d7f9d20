"""Run by the vLLM environment's Python, with vLLM's own flags: start the engine in this process,
say so, and end.

python benchmarks/support/vllm_start.py --model FOLDER [vLLM's flags]
python benchmarks/support/vllm_start.py --feasible MAX_LEN POOL_BYTES --model FOLDER [vLLM's flags]

The second form asks vLLM's own planning code: the longest request that fits in POOL_BYTES, and the
smallest pool that holds a request of MAX_LEN, each with what the flags set; one JSON line.
"""

import json
import os
import sys

os.environ.update(VLLM_ENABLE_V1_MULTIPROCESSING="0", HF_HUB_OFFLINE="1")


def engine(flags: list[str]):
    from vllm import LLM
    from vllm.engine.arg_utils import EngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    asked = EngineArgs.add_cli_args(FlexibleArgumentParser()).parse_args(flags)
    defaults = EngineArgs.add_cli_args(FlexibleArgumentParser()).parse_args(
        ["--model", asked.model]
    )
    given = {name: value for name, value in vars(asked).items() if value != getattr(defaults, name)}
    given |= {
        flag[5:].replace("-", "_"): False for flag in flags if flag.startswith("--no-")
    }  # also where it is vLLM's default
    small = {
        "max_num_seqs": 4,
        "max_num_batched_tokens": 512,
        "mamba_ssm_cache_dtype": "float32",
        "enforce_eager": True,
    }
    arguments = {
        **small,
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "distributed_executor_backend": "uni",
        **given,
    }
    return LLM(**{**arguments, "model": asked.model})


def feasible(flags: list[str], length: int, pool_bytes: int) -> dict:
    """What vLLM's own planning code makes of a pool, and of a length; settings other than those two
    are the flags'.
    """
    from vllm.v1.core.kv_cache_utils import get_kv_cache_configs

    llm = engine([*flags, "--max-model-len", "64", "--kv-cache-memory-bytes", str(1 << 30)])
    core = llm.llm_engine.engine_core.engine_core
    config = core.vllm_config
    specs = core.model_executor.get_kv_cache_specs()

    def fits(max_model_len: int, available_bytes: int) -> bool:
        config.model_config.max_model_len = max_model_len
        try:
            get_kv_cache_configs(config, specs, [available_bytes])
        except ValueError:
            return False
        return True

    longest = 0
    high = length
    while longest < high:
        middle = (longest + high + 1) // 2
        longest, high = (middle, high) if fits(middle, pool_bytes) else (longest, middle - 1)
    low = 1
    high = 1 << 42
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if fits(length, middle) else (middle + 1, high)
    return {"longest_tokens": longest, "smallest_pool_bytes": low}


def main() -> None:
    if sys.argv[1] == "--feasible":
        print(
            "FEASIBLE " + json.dumps(feasible(sys.argv[4:], int(sys.argv[2]), int(sys.argv[3]))),
            flush=True,
        )
    else:
        cache = engine(sys.argv[1:]).llm_engine.vllm_config.cache_config
        print(
            "STARTED "
            + json.dumps({"tokens": cache.kv_cache_size_tokens, "blocks": cache.num_gpu_blocks}),
            flush=True,
        )
    os._exit(0)  # nothing is left to be saved, and an engine in this process takes seconds to end


if __name__ == "__main__":
    main()
