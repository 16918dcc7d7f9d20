"""A small server of our own: GET /health, POST /say."""
import argparse
import signal

from aiohttp import web
from vllm import SamplingParams
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.v1.engine.async_llm import AsyncLLM

parser = argparse.ArgumentParser()
parser.add_argument("--port", type=int, default=8000)


async def start(app):
    app["engine"] = AsyncLLM.from_engine_args(AsyncEngineArgs(
        model="./model", max_model_len=4096, kv_cache_memory_bytes=64 << 20, dtype="float16", load_format="dummy", enforce_eager=True))


async def stop(app):
    app["engine"].shutdown()


async def health(request):
    await request.app["engine"].check_health()
    return web.Response(text="ok")


async def say(request):
    last = None
    async for out in request.app["engine"].generate(await request.text(), SamplingParams(max_tokens=8), request_id=str(id(request))):
        last = out
    return web.json_response({"text": last.outputs[0].text})


if __name__ == "__main__":
    args = parser.parse_args()
    app = web.Application()
    app.on_startup.append(start)
    app.on_cleanup.append(stop)
    app.add_routes([web.get("/health", health), web.post("/say", say)])
    web.run_app(app, host="127.0.0.1", port=args.port)
