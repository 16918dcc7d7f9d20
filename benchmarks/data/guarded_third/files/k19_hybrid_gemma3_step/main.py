import enum
import operator

from vllm import LLM, SamplingParams

import oomguard


class Key(enum.StrEnum):
    MAX_MODEL_LEN = enum.auto()
    MAX_NUM_SEQS = enum.auto()
    MAX_NUM_BATCHED_TOKENS = enum.auto()
    KV_CACHE_MEMORY_BYTES = enum.auto()


WHERE = {
    Key.MAX_NUM_BATCHED_TOKENS: "scheduler_config",
    Key.MAX_MODEL_LEN: "model_config",
    Key.MAX_NUM_SEQS: "scheduler_config",
    Key.KV_CACHE_MEMORY_BYTES: "cache_config",
}
CHOSEN = dict(zip(Key, (8192, 16, 8192, 13_120_000)))


def main():
    match oomguard.guard(pin=[Key.MAX_MODEL_LEN.value]):
        case guard:
            with guard:
                (llm := LLM("./minutes", dtype="float32", load_format="dummy", enforce_eager=True, **CHOSEN))
    outputs = llm.generate(["item one", "item two"], SamplingParams(max_tokens=8, ignore_eos=True), use_tqdm=False)
    print("tokens", [len(o.outputs[0].token_ids) for o in outputs])
    for key, part in WHERE.items():
        print("VALUE", key, operator.attrgetter(f"{part}.{key}")(llm.llm_engine.vllm_config))
    print("INPROC-DONE")


if __name__ == "__main__":
    main()
