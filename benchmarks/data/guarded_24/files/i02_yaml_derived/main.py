import pathlib

import yaml
from vllm import LLM, SamplingParams

import oomguard

HERE = pathlib.Path(__file__).parent


@oomguard.guard
def load(path):
    config = yaml.safe_load(path.read_text())
    return LLM(**config["engine"]), SamplingParams(**config["sampling"])


def main():
    llm, sampling = load(HERE / "settings.yaml")
    conversation = [{"role": "system", "content": "You are a helpful clerk."}, {"role": "user", "content": "When is the office open?"}]
    template = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}assistant:"
    reply = llm.chat(conversation, sampling, chat_template=template)[0].outputs[0]
    print("reply of", len(reply.token_ids), "tokens")
    print("VALUE max_model_len", llm.llm_engine.vllm_config.model_config.max_model_len)
    print("INPROC-DONE")


if __name__ == "__main__":
    main()
