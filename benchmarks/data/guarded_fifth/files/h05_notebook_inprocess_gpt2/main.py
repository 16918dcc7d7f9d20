# %% [markdown]
# # Poems with GPT-2
# Exported with `jupyter nbconvert --to script`. The engine runs in the notebook's own process, for the debugger.

# %%
import os

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"

# %%
from vllm import LLM, SamplingParams

import oomguard

# %%
with oomguard.guard(allow="reduces-capacity") as g:
    llm = LLM(
        model="./poet",
        max_model_len=4096,
        max_num_seqs=8,
        kv_cache_memory_bytes=12_000_000,
        dtype="float16",
        load_format="dummy",
        enforce_eager=True,
    )
g.attempts

# %%
lines = ["Shall I compare thee", "Two roads diverged", "Because I could not stop"]
outputs = llm.generate(lines, SamplingParams(temperature=0.8, top_p=0.95, max_tokens=16, ignore_eos=True, seed=1))
for output in outputs:
    print(output.prompt, "->", len(output.outputs[0].token_ids))

# %%
config = llm.llm_engine.vllm_config
print("VALUE max_model_len", config.model_config.max_model_len)
print("VALUE max_num_seqs", config.scheduler_config.max_num_seqs)
print("VALUE kv_cache_memory_bytes", config.cache_config.kv_cache_memory_bytes)
print("INPROC-DONE")
