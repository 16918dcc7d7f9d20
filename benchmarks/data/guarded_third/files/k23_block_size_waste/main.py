import configparser
import typing

from vllm import LLM, SamplingParams

import oomguard

INI = """
[engine]
model = ./forms
max_model_len = 3000
max_num_seqs = 6
block_size = 256
kv_cache_memory_bytes = 4992000
dtype = float16
load_format = dummy
enforce_eager = yes
"""


class Options(typing.TypedDict):
    model: str
    max_model_len: int
    max_num_seqs: int
    block_size: int
    kv_cache_memory_bytes: int
    dtype: str
    load_format: str
    enforce_eager: bool


def read(text) -> Options:
    parser = configparser.ConfigParser()
    parser.read_string(text)
    get = {str: parser.get, int: parser.getint, bool: parser.getboolean}
    return Options(**{key: get[kind]("engine", key) for key, kind in typing.get_type_hints(Options).items()})


class Session(LLM):
    """Closes over nothing, opens under the guard."""

    def __init__(self, options: Options):
        with oomguard.guard(allow="reduces-capacity") as self.guard:
            super().__init__(**options)


def main():
    session = Session(read(INI))
    outputs = session.generate(["name", "street", "city"], SamplingParams(max_tokens=6, ignore_eos=True), use_tqdm=False)
    print("tokens", [len(o.outputs[0].token_ids) for o in outputs], "attempts", len(session.guard.attempts))
    config = session.llm_engine.vllm_config
    print("VALUE block_size", config.cache_config.block_size)
    print("VALUE max_model_len", config.model_config.max_model_len)
    print("VALUE kv_cache_memory_bytes", config.cache_config.kv_cache_memory_bytes)
    print("VALUE max_num_seqs", config.scheduler_config.max_num_seqs)
    print("INPROC-DONE")


if __name__ == "__main__":
    main()
