"""Tag tickets; the machine is shared, so the engine gets a small part of its memory."""
import json
from dataclasses import asdict, dataclass

from vllm import LLM, SamplingParams

import oomguard


@dataclass
class Engine:
    model: str
    dtype: str = "float16"
    load_format: str = "dummy"
    max_model_len: int = 2048
    max_num_seqs: int = 4
    gpu_memory_utilization: float = 0.9
    num_gpu_blocks_override: int | None = None
    enforce_eager: bool = True


def main():
    with open("engine.json") as file:
        engine = Engine(**json.load(file))
    with oomguard.guard():
        llm = LLM(**asdict(engine))
    tickets = ["printer does not print", "password forgotten", "screen is black"]
    for ticket, output in zip(tickets, llm.generate(tickets, SamplingParams(max_tokens=4, ignore_eos=True)), strict=True):
        print(ticket, "->", output.outputs[0].token_ids)
    print("VALUE gpu_memory_utilization", llm.llm_engine.vllm_config.cache_config.gpu_memory_utilization)
    print("VALUE max_model_len", llm.llm_engine.vllm_config.model_config.max_model_len)
    print("INPROC-DONE")


if __name__ == "__main__":
    main()
