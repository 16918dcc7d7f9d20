"""Vectors of a few questions, after vLLM's example of offline embeddings."""
import sys

from vllm import LLM

QUESTIONS = ["What is the capital of China?", "Explain gravity.", "Who wrote Faust?", "How far is the moon?", "Why is the sky blue?"]


def main(model):
    llm = LLM(model=model, runner="pooling", gpu_memory_utilization=0.04, max_num_seqs=16, dtype="float16",
              load_format="dummy", enforce_eager=True)
    outs = llm.embed(QUESTIONS, use_tqdm=False)
    print("EMBEDDED", len(outs), len(outs[0].outputs.embedding), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
