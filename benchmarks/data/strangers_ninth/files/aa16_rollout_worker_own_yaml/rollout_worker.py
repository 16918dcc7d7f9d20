"""A worker that samples responses from the current policy."""
import argparse
import asyncio

import yaml
from vllm import AsyncEngineArgs, SamplingParams
from vllm.inputs import TokensPrompt
from vllm.v1.engine.async_llm import AsyncLLM


async def one(engine, number, prompt_length, response_length):
    prompt = TokensPrompt(prompt_token_ids=[30 + number] * prompt_length)
    params = SamplingParams(temperature=1.0, max_tokens=response_length, ignore_eos=True)
    async for out in engine.generate(prompt, params, request_id=f"rollout-{number}"):
        last = out
    return len(last.outputs[0].token_ids)


async def work(config):
    actor = config["actor"]
    rollout = config["rollout"]
    engine = AsyncLLM.from_engine_args(AsyncEngineArgs(model=actor["path"], dtype=actor["dtype"], **rollout["engine"]))
    try:
        jobs = [one(engine, i, rollout["prompt_length"], rollout["response_length"]) for i in range(3)]
        lengths = await asyncio.gather(*jobs)
    finally:
        engine.shutdown()
    print("ROLLED", len(lengths), list(lengths), flush=True)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--config", required=True)
    with open(parser.parse_args().config) as f:
        asyncio.run(work(yaml.safe_load(f)))


if __name__ == "__main__":
    main()
