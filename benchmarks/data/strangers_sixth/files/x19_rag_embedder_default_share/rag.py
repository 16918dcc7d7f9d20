"""Embed three passages, answer one question: both models live in this program."""
from vllm import LLM, SamplingParams
from vllm.inputs import TokensPrompt


def main():
    writer = LLM(model="./writer", dtype="float16", load_format="dummy", enforce_eager=True, max_model_len=8192,
                 max_num_seqs=16, kv_cache_memory_bytes=5 * 1024**3)
    embedder = LLM(model="./bert", runner="pooling", dtype="float16", load_format="dummy", enforce_eager=True)
    passages = [TokensPrompt(prompt_token_ids=[11 + i] * 60) for i in range(3)]
    vectors = [o.outputs.embedding for o in embedder.embed(passages)]
    question = TokensPrompt(prompt_token_ids=[9] * 100)
    answer = writer.generate([question], SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True))[0]
    print("RAG", len(vectors), len(vectors[0]), len(answer.outputs[0].token_ids), flush=True)


if __name__ == "__main__":
    main()
