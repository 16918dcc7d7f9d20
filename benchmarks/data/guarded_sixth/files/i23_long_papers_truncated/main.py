import click
from vllm import LLM, SamplingParams
from vllm.exceptions import VLLMValidationError

import oomguard


def papers():
    for number, pages in enumerate((1, 3, 9, 2, 14, 1)):
        yield f"paper-{number}", [20 + (number * 71 + i * 3) % 1400 for i in range(700 * pages)]


class Summarizer:
    def __init__(self, llm, tokens):
        self.llm = llm
        self.tokens = tokens
        self.cut = {}

    def one(self, name, paper):
        sampling = SamplingParams(max_tokens=self.tokens, ignore_eos=True, temperature=0)
        try:
            (output,) = self.llm.generate([{"prompt_token_ids": paper}], sampling, use_tqdm=False)
        except VLLMValidationError as error:  # longer than the maximum model length
            room = self.llm.llm_engine.vllm_config.model_config.max_model_len - self.tokens
            if len(paper) <= room:
                raise
            self.cut[name] = len(paper) - room
            click.echo(f"{name} is cut: {type(error).__name__}")
            (output,) = self.llm.generate([{"prompt_token_ids": paper[:room]}], sampling, use_tqdm=False)
        return len(output.prompt_token_ids), len(output.outputs[0].token_ids)


@click.command()
@click.option("--context", type=int, default=50_000)
@click.option("--cache", "cache_bytes", type=int, default=15_000_000)
@click.option("--tokens", type=int, default=8)
def main(context, cache_bytes, tokens):
    with oomguard.guard(allow="reduces-capacity", floors={"max_model_len": 4000}):
        llm = LLM(
            "./reader",
            dtype="float16",
            load_format="dummy",
            enforce_eager=True,
            max_model_len=context,
            max_num_seqs=2,
            max_num_batched_tokens=2048,
            kv_cache_memory_bytes=cache_bytes,
        )
    summarizer = Summarizer(llm, tokens)
    results = {name: summarizer.one(name, paper) for name, paper in papers()}
    length = llm.llm_engine.vllm_config.model_config.max_model_len
    for name, paper in papers():
        assert results[name] == (min(len(paper), length - tokens), tokens), (name, results[name])
    assert set(summarizer.cut) == {"paper-2", "paper-4"}, summarizer.cut
    click.echo(f"VALUE max_model_len {length}")
    click.echo(f"VALUE max_num_seqs {llm.llm_engine.vllm_config.scheduler_config.max_num_seqs}")
    click.echo("VALUE max_num_batched_tokens "
               f"{llm.llm_engine.vllm_config.scheduler_config.max_num_batched_tokens}")
    click.echo("VALUE kv_cache_memory_bytes "
               f"{llm.llm_engine.vllm_config.cache_config.kv_cache_memory_bytes}")


if __name__ == "__main__":
    main(standalone_mode=False)
    print("INPROC-DONE")
