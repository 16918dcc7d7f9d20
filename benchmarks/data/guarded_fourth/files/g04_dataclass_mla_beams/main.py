from dataclasses import asdict, dataclass, field, fields

from vllm import LLM
from vllm.sampling_params import BeamSearchParams

import oomguard


@dataclass
class Engine:
    model: str = "./compressor"
    dtype: str = "float16"
    load_format: str = "dummy"
    enforce_eager: bool = True
    max_model_len: int = 8192
    max_num_seqs: int = 16
    kv_cache_memory_bytes: int = 8_000_000
    enable_prefix_caching: bool = False


@dataclass
class Beams:
    beam_width: int = 3
    max_tokens: int = 5
    temperature: float = 0.0
    ignore_eos: bool = True


@dataclass
class Experiment:
    engine: Engine = field(default_factory=Engine)
    beams: Beams = field(default_factory=Beams)
    prompts: tuple = ("an abstract of a paper", "a title")

    def run(self):
        before = asdict(self.engine)
        with oomguard.guard(allow="reduces-capacity"):
            llm = LLM(**{f.name: getattr(self.engine, f.name) for f in fields(self.engine)})
        assert asdict(self.engine) == before
        tokenizer = llm.get_tokenizer()
        prompts = [{"prompt_token_ids": tokenizer.encode(text)} for text in self.prompts]
        for output in llm.beam_search(prompts, BeamSearchParams(**asdict(self.beams))):
            print("beams", [len(sequence.tokens) for sequence in output.sequences])
        return llm.llm_engine.vllm_config


if __name__ == "__main__":
    config = Experiment().run()
    print("VALUE max_model_len", config.model_config.max_model_len)
    print("VALUE max_num_seqs", config.scheduler_config.max_num_seqs)
    print("VALUE kv_cache_memory_bytes", config.cache_config.kv_cache_memory_bytes)
    print("VALUE enable_prefix_caching", config.cache_config.enable_prefix_caching)
    print("INPROC-DONE")
