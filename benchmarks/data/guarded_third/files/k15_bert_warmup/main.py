import csv
import io
import resource
import sys

from vllm import LLM, TokensPrompt

import oomguard

TABLE = """id,length
a,400
b,90
c,17
d,256
"""


def rows():
    for number, row in enumerate(csv.DictReader(io.StringIO(TABLE))):
        yield row["id"], TokensPrompt(prompt_token_ids=[9 + (number * 53 + n * 7) % 2000 for n in range(int(row["length"]))])


with_guard = oomguard.guard()


def main(limit=4 << 30):
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    with with_guard as g:
        llm = LLM(
            "./sentences",
            runner="pooling",
            max_model_len=512,
            max_num_seqs=64,
            max_num_batched_tokens=32768,
            gpu_memory_utilization=0.2,
            dtype="float16",
            load_format="dummy",
            compilation_config={"mode": 2, "backend": "eager"},
        )
        names, prompts = zip(*rows())
        vectors = {name: o.outputs.embedding for name, o in zip(names, llm.embed(list(prompts), use_tqdm=False))}
    print("vectors", {name: len(vector) for name, vector in vectors.items()}, "starts", len(g.attempts), file=sys.stdout)
    config = llm.llm_engine.vllm_config
    print("VALUE max_num_batched_tokens", config.scheduler_config.max_num_batched_tokens)
    print("VALUE max_model_len", config.model_config.max_model_len)
    print("VALUE max_num_seqs", config.scheduler_config.max_num_seqs)
    print("VALUE gpu_memory_utilization", config.cache_config.gpu_memory_utilization)
    print("INPROC-DONE")


if __name__ == "__main__":
    main()
