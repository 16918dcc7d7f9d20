import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from vllm import LLM, SamplingParams
from vllm.lora.request import LoRARequest

import oomguard

CUSTOMERS = ["bakery", "garage", "florist"]


def train(name, rank=16, layers=6, hidden=1024):
    """Stands for the training: an adapter as PEFT writes it."""
    folder = Path("adapters") / name
    folder.mkdir(parents=True, exist_ok=True)
    weights = {}
    for layer in range(layers):
        stem = f"base_model.model.model.layers.{layer}.self_attn.o_proj"
        weights[f"{stem}.lora_A.weight"] = torch.full((rank, hidden), 0.01, dtype=torch.float16)
        weights[f"{stem}.lora_B.weight"] = torch.full((hidden, rank), 0.02, dtype=torch.float16)
    save_file(weights, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": 32, "target_modules": ["o_proj"], "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return str(folder)


def main():
    with oomguard.guard():
        llm = LLM(
            model="./mail",
            dtype="float16",
            load_format="dummy",
            enforce_eager=True,
            max_model_len=2048,
            max_num_seqs=8,
            max_num_batched_tokens=2048,
            gpu_memory_utilization=0.05,
            enable_lora=True,
            max_loras=8,
            max_lora_rank=256,
        )
    sampling = SamplingParams(max_tokens=5, temperature=0, ignore_eos=True)
    requests = [LoRARequest(name, number, train(name)) for number, name in enumerate(CUSTOMERS, start=1)]
    prompts = [f"Dear customer of the {name}," for name in CUSTOMERS]
    for output in llm.generate(prompts, sampling, lora_request=requests, use_tqdm=False):
        print(output.lora_request.lora_name, len(output.outputs[0].token_ids))
    config = llm.llm_engine.vllm_config
    print("VALUE gpu_memory_utilization", config.cache_config.gpu_memory_utilization)
    print("VALUE max_loras", config.lora_config.max_loras)
    print("VALUE max_lora_rank", config.lora_config.max_lora_rank)
    print("VALUE max_model_len", config.model_config.max_model_len)
    print("VALUE max_num_seqs", config.scheduler_config.max_num_seqs)


if __name__ == "__main__":
    main()
    print("INPROC-DONE")
