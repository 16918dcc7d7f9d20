"""The first action for common failures of transformers calls and loads."""

import oomguard

FULL = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate {tried} GiB. GPU 0 has a total "
    "capacity of 23.64 GiB of which 1.20 GiB is free. Including non-PyTorch memory, this process "
    "has {own} GiB memory in use. Of the allocated memory {own} GiB is allocated by PyTorch, and "
    "100.00 MiB is reserved by PyTorch but unallocated.\n"
)
MODEL = (
    '  File "/env/transformers/models/qwen2/modeling_qwen2.py", line 150, in {where}\n    {line}\n'
)


def first_action(*, frames: str, tried: float = 4.5, own: float = 22.10, after: str = ""):
    text = "Traceback (most recent call last):\n"
    text += '  File "job.py", line 9, in <module>\n    out = model(ids)\n'
    text += frames + FULL.format(tried=tried, own=own) + after
    (incident,) = oomguard.diagnose(text=text).incidents
    return incident.actions[0]


def test_eager_attention_gets_sdpa_first():
    line = "attn_weights = nn.functional.softmax(attn_weights, dim=-1, dtype=torch.float32)"
    frames = MODEL.format(where="eager_attention_forward", line=line)
    assert first_action(frames=frames).id == "attn_implementation"


def test_logits_of_a_forward_call_get_logits_to_keep_first():
    frames = MODEL.format(where="forward", line="logits = logits.float()")
    action = first_action(frames=frames)
    assert action.id == "logits_to_keep"
    assert "logits_to_keep=1" in action.command


def test_one_row_is_not_advised_to_be_split():
    frames = MODEL.format(where="forward", line="down_proj = self.down_proj(x)")
    action = first_action(frames=frames, after=">>> ids.shape\ntorch.Size([1, 30000])\n")
    assert action.id == "wrap_in_guard"
    assert "in chunks" in action.title
    assert "splits the batch" not in action.title
