"""The regression test of our answers."""
import unittest

from vllm import LLM, SamplingParams
from vllm.inputs import TokensPrompt


class TestAnswers(unittest.TestCase):
    def test_lengths(self):
        llm = LLM("./v2", block_size=16, num_gpu_blocks_override=1000, gpu_memory_utilization=0.2, max_num_seqs=8,
                  dtype="float16", load_format="dummy", enforce_eager=True)
        prompts = [TokensPrompt(prompt_token_ids=[20 + i] * 60) for i in range(2)]
        outs = llm.generate(prompts, SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True))
        lengths = [len(o.outputs[0].token_ids) for o in outs]
        print("ANSWERS", len(outs), lengths, flush=True)
        self.assertEqual(lengths, [8, 8])


if __name__ == "__main__":
    unittest.main()
