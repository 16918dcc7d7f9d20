from PIL import Image
from vllm import LLM, SamplingParams


def caption(model, size):
    llm = LLM(model, dtype="float16", load_format="dummy", enforce_eager=True, max_model_len=1024, max_num_seqs=4,
              kv_cache_memory_bytes=32 << 20, limit_mm_per_prompt={"image": 1})
    prompts = [{"prompt": "Question: what is it? Answer:", "multi_modal_data": {"image": Image.new("RGB", (size, size), colour)}}
               for colour in ("red", "green")]
    outs = llm.generate(prompts, SamplingParams(max_tokens=4, ignore_eos=True))
    return [len(o.outputs[0].token_ids) for o in outs]
