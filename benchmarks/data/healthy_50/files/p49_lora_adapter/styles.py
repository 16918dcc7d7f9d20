import json
import pathlib

import torch
from safetensors.torch import save_file
from vllm import LLM, SamplingParams
from vllm.lora.request import LoRARequest


def make_adapter(folder, rank, hidden=192, layers=3):
    folder = pathlib.Path(folder)
    folder.mkdir(exist_ok=True)
    (folder / "adapter_config.json").write_text(json.dumps(dict(
        peft_type="LORA", task_type="CAUSAL_LM", r=rank, lora_alpha=2 * rank, target_modules=["o_proj"], bias="none", base_model_name_or_path="./model")))
    tensors = {}
    for i in range(layers):
        name = f"base_model.model.model.layers.{i}.self_attn.o_proj"
        tensors[f"{name}.lora_A.weight"] = torch.full((rank, hidden), 0.01, dtype=torch.float16)
        tensors[f"{name}.lora_B.weight"] = torch.full((hidden, rank), 0.01, dtype=torch.float16)
    save_file(tensors, folder / "adapter_model.safetensors")
    return str(folder)


if __name__ == "__main__":
    llm = LLM("./model", enable_lora=True, max_loras=2, max_lora_rank=16, max_model_len=1024, kv_cache_memory_bytes=32 << 20, dtype="float16", load_format="dummy",
              enforce_eager=True, max_num_seqs=8)
    styles = [LoRARequest("polite", 1, make_adapter("polite", 8)), LoRARequest("terse", 2, make_adapter("terse", 16))]
    outs = llm.generate(["hello", "hello"], SamplingParams(max_tokens=4, ignore_eos=True), lora_request=styles)
    print("HEALTHY50-DONE", [o.lora_request.lora_name for o in outs], flush=True)
