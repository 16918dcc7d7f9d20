import asyncio
import json
import pathlib
import resource

import torch
from safetensors.torch import save_file
from vllm import AsyncEngineArgs, AsyncLLMEngine, SamplingParams
from vllm.lora.request import LoRARequest

import oomguard

CUSTOMERS = ["north", "east", "south", "west"]


def write_adapter(name, rank=16, hidden=1024, layers=4):
    folder = pathlib.Path("adapters") / name
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {}
    for layer in range(layers):
        stem = f"base_model.model.model.layers.{layer}.self_attn.o_proj"
        tensors[f"{stem}.lora_A.weight"] = torch.full((rank, hidden), 0.002, dtype=torch.float16)
        tensors[f"{stem}.lora_B.weight"] = torch.full((hidden, rank), 0.002, dtype=torch.float16)
    save_file(tensors, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(
        json.dumps({"peft_type": "LORA", "r": rank, "lora_alpha": 16, "target_modules": ["o_proj"], "bias": "none"})
    )
    return str(folder.resolve())


async def ask(engine, number, name):
    adapter = LoRARequest(name, number + 1, write_adapter(name))
    sampling = SamplingParams(max_tokens=3 + number, ignore_eos=True)
    async for output in engine.generate("dear "
                                        f"{name}", sampling, f"to-{name}", lora_request=adapter):
        if output.finished:
            return output.lora_request.lora_name, len(output.outputs[0].token_ids)


async def main():
    args = AsyncEngineArgs(
        model="./mailer",
        dtype="float16",
        load_format="dummy",
        enforce_eager=True,
        max_model_len=1024,
        max_num_seqs=8,
        max_num_batched_tokens=1024,
        kv_cache_memory_bytes=60_000_000,
        enable_lora=True,
        max_loras=256,  # every customer has one
        max_cpu_loras=300,
        max_lora_rank=64,
    )
    with oomguard.guard(allow="reduces-capacity", pin=["max_lora_rank"]):
        engine = AsyncLLMEngine.from_engine_args(args)
    answers = await asyncio.gather(*(ask(engine, n, name) for n, name in enumerate(CUSTOMERS)))
    assert answers == [(name, 3 + n) for n, name in enumerate(CUSTOMERS)], answers
    assert args.max_loras == 256
    config = engine.vllm_config
    print("VALUE max_loras", config.lora_config.max_loras)
    print("VALUE max_lora_rank", config.lora_config.max_lora_rank)
    print("VALUE max_model_len", config.model_config.max_model_len)
    print("VALUE max_num_seqs", config.scheduler_config.max_num_seqs)
    print("VALUE kv_cache_memory_bytes", config.cache_config.kv_cache_memory_bytes)
    engine.shutdown()


if __name__ == "__main__":
    resource.setrlimit(resource.RLIMIT_DATA, (3 * 2**30, 3 * 2**30))
    asyncio.run(main())
    print("INPROC-DONE")
