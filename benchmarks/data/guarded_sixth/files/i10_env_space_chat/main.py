"""Run as: VLLM_CPU_KVCACHE_SPACE=1 python main.py"""

import attr
from vllm import LLM, SamplingParams

import oomguard


@attr.s(auto_attribs=True)
class Conversation:
    system: str
    turns: list = attr.Factory(list)

    def messages(self, question):
        return [{"role": "system", "content": self.system}, *self.turns, {"role": "user", "content": question}]

    def keep(self, question, answer):
        self.turns += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


def main():
    with oomguard.guard():
        llm = LLM("./tutor", dtype="float16", load_format="dummy", enforce_eager=True, max_num_seqs=6)
    people = [Conversation(f"You teach {subject}.") for subject in ("logic", "law", "latin")]
    sampling = SamplingParams(max_tokens=8, ignore_eos=True, temperature=0.5)
    before = [0] * len(people)
    for question in ("What is it?", "Why?", "Are you sure?"):
        outputs = llm.chat([person.messages(question) for person in people], sampling, use_tqdm=False)
        assert len(outputs) == len(people)
        for number, (person, output) in enumerate(zip(people, outputs)):
            assert len(output.outputs[0].token_ids) == 8
            assert len(output.prompt_token_ids) > before[number]
            before[number] = len(output.prompt_token_ids)
            person.keep(question, output.outputs[0].text)
    assert [len(person.turns) for person in people] == [6, 6, 6]
    config = llm.llm_engine.vllm_config
    print("VALUE max_model_len", config.model_config.max_model_len)
    print("VALUE max_num_seqs", config.scheduler_config.max_num_seqs)
    print("VALUE kv_cache_memory_bytes", config.cache_config.kv_cache_memory_bytes)


if __name__ == "__main__":
    main()
    print("INPROC-DONE")
