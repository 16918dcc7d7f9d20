from contextlib import asynccontextmanager

import yaml
from fastapi import FastAPI

STATE = {}


def engine_config():
    llm = yaml.safe_load(open("settings.yaml"))["llm"]
    return dict(model=llm["path"], max_model_len=llm["context"], kv_cache_memory_bytes=llm["kv_mib"] * 1024 * 1024, **llm["extra"])


@asynccontextmanager
async def lifespan(app):
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    config = engine_config()
    STATE["engine"] = AsyncLLM.from_engine_args(AsyncEngineArgs(**config))
    yield
    STATE.pop("engine").shutdown()


app = FastAPI(lifespan=lifespan)


@app.get("/health")
async def health():
    await STATE["engine"].check_health()
    return {"ok": True}
