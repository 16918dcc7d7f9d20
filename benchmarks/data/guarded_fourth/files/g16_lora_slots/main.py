import json
import resource
from pathlib import Path

import torch
import yaml
from safetensors.torch import save_file
from vllm import LLM, SamplingParams
from vllm.lora.request import LoRARequest

import oomguard

CONFIG = """
engine:
  model: ./tenants
  dtype: float16
  load_format: dummy
  enforce_eager: true
  max_model_len: 1024
  max_num_seqs: 16
  max_num_batched_tokens: 1024
  kv_cache_memory_bytes: 100000000
  enable_lora: true
  max_lora_rank: 256
  max_loras: 48
limit_gib: 3
"""


def adapter(name, rank=8, layers=6, hidden=1024):
    """An adapter as PEFT writes it, for q_proj of all layers."""
    folder = Path("adapters", name)
    folder.mkdir(parents=True, exist_ok=True)
    weights = {}
    for layer in range(layers):
        stem = f"base_model.model.model.layers.{layer}.self_attn.q_proj"
        weights[f"{stem}.lora_A.weight"] = torch.full((rank, hidden), 0.01, dtype=torch.float16)
        weights[f"{stem}.lora_B.weight"] = torch.full((hidden, rank), 0.01, dtype=torch.float16)
    save_file(weights, folder / "adapter_model.safetensors")
    about = {"peft_type": "LORA", "r": rank, "lora_alpha": 16, "target_modules": ["q_proj"], "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(about))
    return str(folder.resolve())


def main():
    config = yaml.safe_load(CONFIG)
    resource.setrlimit(resource.RLIMIT_DATA, (config["limit_gib"] << 30,) * 2)
    with oomguard.guard(allow="reduces-capacity"):
        llm = LLM(**config["engine"])
    sampling = SamplingParams(max_tokens=4, ignore_eos=True, temperature=0)
    for number, tenant in enumerate(["bakery", "library"], start=1):
        request = LoRARequest(tenant, number, adapter(tenant))
        outputs = llm.generate(["dear customer"], sampling, lora_request=request, use_tqdm=False)
        print(tenant, len(outputs[0].outputs[0].token_ids))
    final = llm.llm_engine.vllm_config
    print("VALUE max_loras", final.lora_config.max_loras)
    print("VALUE max_lora_rank", final.lora_config.max_lora_rank)
    print("VALUE max_model_len", final.model_config.max_model_len)
    print("VALUE max_num_seqs", final.scheduler_config.max_num_seqs)
    print("VALUE kv_cache_memory_bytes", final.cache_config.kv_cache_memory_bytes)


if __name__ == "__main__":
    main()
    print("INPROC-DONE")
