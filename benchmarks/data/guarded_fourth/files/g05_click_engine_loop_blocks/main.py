import click
from vllm import EngineArgs, LLMEngine, SamplingParams
from vllm.inputs import TokensPrompt

import oomguard


class Server:
    """The loop of vLLM's llm_engine_example, as a class."""

    def __init__(self, args):
        self.engine = self._start(args)
        self.finished = {}

    @oomguard.guard
    def _start(self, args):
        return LLMEngine.from_engine_args(args)

    def run(self, requests):
        requests = list(requests)
        number = 0
        while requests or self.engine.has_unfinished_requests():
            if requests:
                prompt, sampling = requests.pop(0)
                self.engine.add_request(str(number), prompt, sampling)
                number += 1
            for output in self.engine.step():
                if output.finished:
                    self.finished[output.request_id] = len(output.outputs[0].token_ids)
        return self.finished


@click.command()
@click.option("--context", default=4096, show_default=True)
@click.option("--blocks", default=100, show_default=True, help="size of the cache, in blocks")
@click.option("--block-size", default=32, show_default=True)
@click.option("--seats", default=12, show_default=True)
def main(context, blocks, block_size, seats):
    args = EngineArgs(
        model="./notes",
        dtype="float16",
        load_format="dummy",
        enforce_eager=True,
        max_model_len=context,
        num_gpu_blocks_override=blocks,
        block_size=block_size,
        max_num_seqs=seats,
        kv_cache_memory_bytes=64_000_000,
    )
    server = Server(args)
    prompts = [TokensPrompt(prompt_token_ids=[7 + n] * (20 * n + 5)) for n in range(5)]
    print("finished", server.run((p, SamplingParams(max_tokens=4 + n, ignore_eos=True)) for n, p in enumerate(prompts)))
    config = server.engine.vllm_config
    click.echo(f"VALUE num_gpu_blocks_override {config.cache_config.num_gpu_blocks_override}")
    click.echo(f"VALUE max_model_len {config.model_config.max_model_len}")
    click.echo(f"VALUE block_size {config.cache_config.block_size}")
    click.echo(f"VALUE max_num_seqs {config.scheduler_config.max_num_seqs}")
    click.echo(f"VALUE kv_cache_memory_bytes {config.cache_config.kv_cache_memory_bytes}")


if __name__ == "__main__":
    main(standalone_mode=False)
    print("INPROC-DONE")
