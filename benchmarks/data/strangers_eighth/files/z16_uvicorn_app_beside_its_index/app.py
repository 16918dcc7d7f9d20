"""Our own server: an index in memory and a model beside it."""
from contextlib import asynccontextmanager

import numpy as np
from fastapi import FastAPI
from vllm import SamplingParams
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.inputs import TokensPrompt
from vllm.v1.engine.async_llm import AsyncLLM

STATE = {}


@asynccontextmanager
async def lifespan(app):
    STATE["index"] = np.ones((4 * 2**18, 1024), dtype=np.float32)  # 4 GiB
    STATE["engine"] = AsyncLLM.from_engine_args(AsyncEngineArgs(
        model="./qwen", max_model_len=32768, max_num_seqs=8, gpu_memory_utilization=0.95, dtype="float16",
        load_format="dummy", enforce_eager=True, disable_log_stats=True))
    yield
    STATE["engine"].shutdown()


app = FastAPI(lifespan=lifespan)


@app.get("/health")
async def health():
    await STATE["engine"].check_health()
    return {"rows": len(STATE["index"])}


@app.get("/answer")
async def answer(row: int = 0):
    prompt = TokensPrompt(prompt_token_ids=[20 + row % 1000] * 30)
    async for out in STATE["engine"].generate(prompt, SamplingParams(max_tokens=8), request_id=f"row-{row}"):
        last = out
    return {"tokens": list(last.outputs[0].token_ids)}
