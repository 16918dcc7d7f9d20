"""Start the real engine in this process with the settings given as JSON; print whether it starts, and its numbers."""

import json
import os
import sys

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"


def main() -> None:
    from vllm import LLM

    for text in sys.argv[1:]:
        try:
            llm = LLM(
                model="./tiny",
                enforce_eager=True,
                distributed_executor_backend="uni",
                **json.loads(text),
            )
        except ValueError as error:
            print("STARTS", json.dumps({"starts": False, "error": str(error)}), flush=True)
            continue
        config = llm.llm_engine.vllm_config
        answer = {
            "starts": True,
            "max_model_len": config.model_config.max_model_len,
            "gpu_memory_utilization": config.cache_config.gpu_memory_utilization,
        }
        print("STARTS", json.dumps(answer), flush=True)
        del llm


if __name__ == "__main__":
    main()
