"""Find duplicates among product photos with a SigLIP."""
from PIL import Image
from vllm import LLM

import oomguard


def main():
    with oomguard.guard():
        llm = LLM(model="./siglip", runner="pooling", dtype="float32", load_format="dummy", kv_cache_memory_bytes=32 * 2**20)
    photos = [Image.new("RGB", (300, 200), color) for color in ("red", "green", "red")]
    outputs = llm.embed([{"prompt": "", "multi_modal_data": {"image": photo}} for photo in photos])
    vectors = [output.outputs.embedding for output in outputs]
    difference = sum(abs(a - b) for a, b in zip(vectors[0], vectors[2], strict=True))
    print("photos 1 and 3 are the same:", difference < 1e-3)
    scheduler = llm.llm_engine.vllm_config.scheduler_config
    print("VALUE max_num_seqs", scheduler.max_num_seqs)
    print("VALUE max_num_batched_tokens", scheduler.max_num_batched_tokens)
    print("INPROC-DONE")


if __name__ == "__main__":
    main()
