import pathlib

import yaml
from vllm import LLM, SamplingParams

import oomguard

HERE = pathlib.Path(__file__).parent


class Job:
    registry = {}

    def __init_subclass__(cls, kind):
        Job.registry[kind] = cls

    def __init__(self, spec, engine):
        self.spec = spec
        self.engine = engine


class Complete(Job, kind="complete"):
    def run(self):
        sampling = SamplingParams(**self.spec["sampling"])
        outputs = self.engine.generate(self.spec["prompts"], sampling, use_tqdm=False)
        assert [o.prompt for o in outputs] == self.spec["prompts"]
        return [len(o.outputs[0].token_ids) for o in outputs]


class Variants(Job, kind="variants"):
    def run(self):
        sampling = SamplingParams(**self.spec["sampling"], n=self.spec["count"])
        (output,) = self.engine.generate([self.spec["prompt"]], sampling, use_tqdm=False)
        return [len(choice.token_ids) for choice in output.outputs]


def main():
    plan = yaml.safe_load((HERE / "plan.yaml").read_text())
    with oomguard.guard(**plan["guard"]):
        engine = LLM(**plan["defaults"], **plan["engine"])
    for spec in plan["jobs"]:
        lengths = Job.registry[spec["kind"]](spec, engine).run()
        print(spec["name"], lengths)
        assert lengths == spec["expect"], (spec["name"], lengths)
    config = engine.llm_engine.vllm_config
    print("VALUE max_model_len", config.model_config.max_model_len)
    print("VALUE max_num_seqs", config.scheduler_config.max_num_seqs)
    print("VALUE max_num_batched_tokens", config.scheduler_config.max_num_batched_tokens)
    print("VALUE kv_cache_memory_bytes", config.cache_config.kv_cache_memory_bytes)


if __name__ == "__main__":
    main()
    print("INPROC-DONE")
