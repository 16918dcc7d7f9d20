"""One step of training, then four samples from the policy."""
import torch
from vllm import LLM, SamplingParams


class Trainer:
    """Weights, gradients and AdamW's two moments of our policy: 4 x 1 GiB."""

    def __init__(self):
        self.state = {name: torch.ones(2**28) for name in ("weights", "grads", "exp_avg", "exp_avg_sq")}

    def step(self):
        self.state["weights"].add_(self.state["grads"], alpha=-1e-4)
        return float(self.state["weights"][0])


def main():
    trainer = Trainer()
    print("step 1:", trainer.step(), flush=True)
    llm = LLM(model="./policy", max_model_len=4096, max_num_seqs=8, num_gpu_blocks_override=200, dtype="float16",
              load_format="dummy", enforce_eager=True, seed=3)
    params = SamplingParams(temperature=1.0, max_tokens=16, ignore_eos=True)
    outs = llm.generate(["Solve 3+4.", "Solve 9-2.", "Solve 5*5.", "Solve 8/2."], params, use_tqdm=False)
    print("SAMPLED", len(outs), [len(o.outputs[0].token_ids) for o in outs], flush=True)


if __name__ == "__main__":
    main()
