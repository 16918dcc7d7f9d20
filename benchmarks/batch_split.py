"""The guard on a simulated device: failed attempts until a batch runs, share of the largest feasible batch, tokens equal.

The device counts the bytes of the real model as it runs; the guard's formula is not asked. The largest feasible
batch is found by trying (bisection with the same model on the same device).
"""

import os

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

CASES = [  # rows, prompt tokens, new tokens, padded, share of the unlimited peak that the device has
    (48, 384, 16, True, 0.5), (48, 384, 16, False, 0.3), (64, 128, 64, True, 0.6), (120, 64, 16, False, 0.4), (16, 1200, 4, True, 0.5),
    (24, 512, 8, False, 0.8),
]  # fmt: skip


def main() -> None:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    import oomguard
    from oomguard.testing import limit_memory

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=2048, hidden_size=256, intermediate_size=768, num_hidden_layers=4, num_attention_heads=8, num_key_value_heads=4,
        max_position_embeddings=4096, pad_token_id=0, bos_token_id=1, eos_token_id=None,
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    failed_total = equal_total = 0
    shares = []
    for rows, prompt, new, padded, share in CASES:
        ids = torch.randint(3, 2048, (rows, prompt))
        mask = torch.ones_like(ids)
        if padded:
            for row in range(rows):
                mask[row, : row * prompt // (2 * rows)] = 0

        def generate(n=rows, ids=ids, mask=mask, new=new):
            return model.generate(input_ids=ids[:n], attention_mask=mask[:n], max_new_tokens=new, do_sample=False)

        with limit_memory(2**40) as device:
            expected = generate()
            capacity = int(device.peak_bytes * share)

        def fits(n, capacity=capacity, generate=generate):
            with limit_memory(capacity):
                try:
                    generate(n)
                except torch.OutOfMemoryError:
                    return False
                return True

        low, high = 1, rows
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if fits(middle) else (low, middle - 1)
        with limit_memory(capacity), oomguard.guard() as g:
            result = generate()
        kept, failed = g.attempts[-1].settings["batch_size"], len(g.attempts) - 1
        equal = bool(torch.equal(result, expected))
        failed_total, equal_total = failed_total + failed, equal_total + equal
        shares.append(kept / low)
        outcome = f"{failed} failed attempts, {kept} rows kept of {low} feasible, tokens equal: {equal}"
        print(f"{rows:4d} rows of {prompt}+{new}, padded {padded!s:5}: {outcome}")
    share = 100 * sum(shares) / len(shares)
    print(f"failed attempts {failed_total / len(CASES):.2f} a case, {share:.1f} % of the largest batch kept")
    print(f"tokens equal in {equal_total} of {len(CASES)}")


if __name__ == "__main__":
    main()
