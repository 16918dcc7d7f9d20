from pathlib import Path

from pydantic_settings import BaseSettings, SettingsConfigDict
from vllm import LLM, SamplingParams

import oomguard


class Settings(BaseSettings):
    model_config = SettingsConfigDict(env_prefix="ANNOTATOR_", env_file=Path(__file__).with_name("annotator.env"))

    model: str
    context: int = 4096
    memory_share: float = 0.5
    parallel: int = 16

    def engine(self):
        return dict(
            model=self.model,
            max_model_len=self.context,
            gpu_memory_utilization=self.memory_share,
            max_num_seqs=self.parallel,
        )


def annotate(llm, texts):
    outputs = llm.generate(texts, SamplingParams(max_tokens=5, ignore_eos=True), use_tqdm=False)
    return {output.prompt: len(output.outputs[0].token_ids) for output in outputs}


def main():
    settings = Settings()
    with oomguard.guard(on_patch=lambda patch: print("changed:", patch.setting)):
        llm = LLM(**settings.engine(), dtype="float16", load_format="dummy", enforce_eager=True)
    print("annotated", annotate(llm, ["a cat", "a dog and a bird", "nothing"]))
    config = llm.llm_engine.vllm_config
    print("VALUE gpu_memory_utilization", config.cache_config.gpu_memory_utilization)
    print("VALUE max_model_len", config.model_config.max_model_len)
    print("VALUE max_num_seqs", config.scheduler_config.max_num_seqs)


if __name__ == "__main__":
    main()
    print("INPROC-DONE")
