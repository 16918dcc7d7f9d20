"""A service with one route; here it is asked by FastAPI's own test client, as in CI."""

import uuid
from contextlib import asynccontextmanager

from fastapi import FastAPI, Request
from fastapi.testclient import TestClient
from pydantic import BaseModel
from vllm import SamplingParams
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.v1.engine.async_llm import AsyncLLM

import oomguard


class Question(BaseModel):
    text: str
    max_tokens: int = 8


@asynccontextmanager
async def lifespan(app: FastAPI):
    args = AsyncEngineArgs(
        model="./helpdesk",
        dtype="float16",
        load_format="dummy",
        enforce_eager=True,
        kv_cache_memory_bytes=16_000_000,
        max_num_seqs=16,
    )
    with oomguard.guard():
        app.state.engine = AsyncLLM.from_engine_args(args)
    yield
    app.state.engine.shutdown()


app = FastAPI(lifespan=lifespan)


@app.post("/answer")
async def answer(question: Question, request: Request):
    engine = request.app.state.engine
    sampling = SamplingParams(max_tokens=question.max_tokens, ignore_eos=True)
    final = None
    async for output in engine.generate(question.text, sampling, str(uuid.uuid4())):
        final = output
    return {"text": final.outputs[0].text, "tokens": len(final.outputs[0].token_ids)}


@app.get("/settings")
async def settings(request: Request):
    config = request.app.state.engine.vllm_config
    return {
        "max_model_len": config.model_config.max_model_len,
        "max_num_seqs": config.scheduler_config.max_num_seqs,
        "kv_cache_memory_bytes": config.cache_config.kv_cache_memory_bytes,
    }


def main():
    with TestClient(app) as client:
        for text in ("my printer is on fire", "how do I reset my password?"):
            reply = client.post("/answer", json={"text": text})
            assert reply.status_code == 200, reply.text
            print("answer of", reply.json()["tokens"], "tokens")
        for name, value in client.get("/settings").json().items():
            print("VALUE", name, value)


if __name__ == "__main__":
    main()
    print("INPROC-DONE")
