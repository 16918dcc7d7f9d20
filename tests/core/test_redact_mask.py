"""Secrets are hidden; counts of tokens and other everyday words are not."""

from __future__ import annotations

import re
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from oomguard.core.redact import MASK, mask, mask_command, mask_value, unmasked


def test_a_secret_is_hidden():
    for text, hidden in [
        ("--api-key=abcdefgh", "--api-key=***"),
        ("api_key: 'abcdefgh'", "api_key: '***'"),
        ("'hf_token': 'abcdefgh'", "'hf_token': '***'"),
        ('"password": "abcdefgh"', '"password": "***"'),
        ("OPENAI_API_KEY=abcdefgh vllm serve", "OPENAI_API_KEY=*** vllm serve"),
        ("HF_TOKEN = abcdefgh", "HF_TOKEN = ***"),
        ("client-secret=abcdefgh", "client-secret=***"),
        (f"using hf_{'aB3' * 8} now", "using *** now"),
        (f"sk-{'a' * 24}", "***"),
        (f"ghp_{'a' * 24}", "***"),
        ("api_key=1234abcd", "api_key=***"),
        ("PASSWORD_ERROR=abcdefgh", "PASSWORD_ERROR=***"),
    ]:
        assert mask(text) == hidden, (text, hidden)


def test_what_is_no_secret_is_left_alone():
    for text in [
        "NoCredentialsError: Unable to locate credentials",
        "--max-num-batched-tokens 8192",
        "--max-num-batched-tokens=8192",
        "max_num_batched_tokens: 8192",
        "'max_num_batched_tokens': 8192, 'seed': 1",
        "max_new_tokens=128)",
        "GPU KV cache size: 2,013,440 tokens",
        "Maximum concurrency for 32,768 tokens per request: 61.45x",
        "tokenizer=org/model",
        "--tokenizer-mode auto",
        "the first token: it is late",
        "monkey=banana",
        "tokens = model.generate(**inputs, max_new_tokens=64)",
        "token = next(stream)",
        "",
    ]:
        assert mask(text) == text, text


@pytest.mark.parametrize(
    "text", ["--api-key abcdefgh", "vllm serve m --hf-token abcdefgh --port 1"]
)
def test_a_secret_after_a_flag_in_running_text_is_hidden(text):
    assert "abcdefgh" not in mask(text)


def test_a_secret_inside_a_python_call_is_hidden():
    assert "abcdefgh" not in mask("token = SecretStr('abcdefgh')")
    assert "abcdefgh" not in mask("hf_token = abcdefgh(x)")


def test_a_secret_in_the_list_of_vllm_s_echo_is_hidden():
    assert "abcdefgh" not in mask("non-default args: {'api_key': ['abcdefgh'], 'model': 'm'}")


@pytest.mark.parametrize(
    "text", ["AWS_SECRET_ACCESS_KEY=abcdefgh", "Authorization: Bearer abcdefgh"]
)
def test_a_secret_of_another_name_is_hidden(text):
    assert "abcdefgh" not in mask(text)


def test_a_token_of_the_vocabulary_is_no_secret():
    for text in ["skip_special_tokens=True", "pad_token=<pad>", "eos_token: </s>", "hf_token=None"]:
        assert mask(text) == text, text


def test_the_secrets_of_a_command_are_hidden():
    for argv, masked in [
        (["vllm", "--api-key", "abc"], ["vllm", "--api-key", MASK]),
        (["vllm", "--api-key=abcd"], ["vllm", f"--api-key={MASK}"]),
        (["env", "HF_TOKEN=abcd"], ["env", f"HF_TOKEN={MASK}"]),
        (["--max-num-batched-tokens", "8192", "m"], ["--max-num-batched-tokens", "8192", "m"]),
        (["--tokenizer", "org/m"], ["--tokenizer", "org/m"]),
        ([], []),
    ]:
        assert mask_command(argv) == masked, (argv, masked)


@settings(deadline=None)
@given(st.text())
def test_masking_twice_is_masking_once(text):
    assert mask(mask(text)) == mask(text)


@settings(deadline=None)
@given(st.lists(st.text(max_size=20), max_size=8))
def test_a_masked_command_keeps_its_words(argv):
    assert len(mask_command(argv)) == len(argv)


@settings(deadline=None)
@given(
    name=st.sampled_from(["api_key", "--api-key", "HF_TOKEN", "db-password", "client_secret"]),
    secret=st.text("abcdefghijklmnop0123456789-_/+", min_size=8).filter(
        lambda text: not text[0].isdigit()
    ),
)
def test_no_secret_after_an_equals_sign_is_left(name, secret):
    assert mask(f"{name}={secret}") == f"{name}={MASK}"


def test_a_secret_is_hidden_to_its_end():
    for text, hidden in [
        ('password="two words"', 'password="***"'),
        ("api_key='it'\"'\"'s' --port 1", "api_key='***' --port 1"),
        ("api_key=SecretStr('abcdefgh')", "api_key=***"),
        ("redis://:abcdefgh@host", "redis://:***@host"),
        ("https://user:p@ss@host/x", "https://user:***@host/x"),
        ("https://abcdefghijklmnop1234@host", "https://***@host"),
        ("Cookie: session=abc; other=def", "Cookie: ***"),
        ("-----BEGIN RSA PRIVATE KEY-----\nabc\n-----END RSA PRIVATE KEY-----", "***"),
        ('os.environ["HF_TOKEN"] = "abc"', 'os.environ["HF_TOKEN"] = "***"'),
        ('{"name": "HF_TOKEN", "value": "abc"}', '{"name": "HF_TOKEN", "value": "***"}'),
        ("auth_token=12345678", "auth_token=***"),
    ]:
        assert mask(text) == hidden, (text, hidden)


def test_what_names_nobody_and_opens_nothing_is_left_alone():
    for text in [
        "kv_bytes_per_token=98304",
        "Time per output token: 35.2ms",
        "throughput per token: 1,024.5 tokens/s",
        "http://localhost:8000/v1",
        "ssh://git@github.com/x",
        "limit_mm_per_prompt={'image': 4}",
        "prompt: 4096 tokens, prompt_logprobs=[5]",
        "--prompt 512",
        "prompt_token_ids: None",
        "content-length: 12",
        '{"message": "CUDA out of memory"}',
        "/root/models/x /homework/x /usr/home.d https://host/home/x ~/home/x",
    ]:
        assert mask(text) == text, text


def test_a_home_folder_is_a_tilde():
    for text, hidden in [
        ("/home/alice/models", "~/models"),
        ("/home/alice", "~"),
        ('File "/Users/alice/x.py", line 3', 'File "~/x.py", line 3'),
        (r"C:\Users\John Smith\x", r"~\x"),
        (r"C:\\Users\\bob\\x", r"~\\x"),
        ("PATH=/bin:/home/a/bin:/home/b/bin", "PATH=/bin:~/bin:~/bin"),
        ("file:///home/alice/x", "file://~/x"),
        ("/mnt/c/Users/alice/x and /gpfs/home/bob", "~/x and ~"),
    ]:
        assert mask(text) == hidden, (text, hidden)


def test_the_text_of_a_prompt_is_hidden():
    for text, hidden in [
        (
            (
                "Received request cmpl-1: prompt: 'It\\'s me, \"you\"', params: SamplingParams(n=1, max_tokens=16), "
                "prompt_token_ids: [1, 2], lora_request: None."
            ),
            (
                "Received request cmpl-1: prompt: '***', params: SamplingParams(n=1, max_tokens=16), "
                "prompt_token_ids: [***], lora_request: None."
            ),
        ),
        (
            '{"model": "m", "messages": [{"content": "[x]"}], "n": 1}',
            '{"model": "m", "messages": [***], "n": 1}',
        ),
        (
            r'{"log": "{\"prompt\": \"say \\\"x\\\"\", \"n\": 1}"}',
            r'{"log": "{\"prompt\": \"***\", \"n\": 1}"}',
        ),
        ("Prompt: 'a', Generated text: 'b'", "Prompt: '***', Generated text: '***'"),
        ('{"type": "text", "text": "hello"}', '{"type": "text", "text": "***"}'),
        ("GenerateReqInput(text='hello', n=1)", "GenerateReqInput(text='***', n=1)"),
        (
            "Generated response cmpl-1: output: 'hello', output_token_ids: [5]",
            "Generated response cmpl-1: output: '***', output_token_ids: [***]",
        ),
        ('prompt="cut off', 'prompt="***'),
        ("--prompt 'two words' --n 1", "--prompt '***' --n 1"),
        ("prompt=''", "prompt=''"),
    ]:
        assert mask(text) == hidden, (text, hidden)


def test_the_prompts_and_homes_of_a_command_are_hidden():
    for argv, masked in [
        (["x", "--prompt", "hello"], ["x", "--prompt", MASK]),
        (["x", "--prompt=hello you"], ["x", f"--prompt={MASK}"]),
        (["x", "--prompt", "512"], ["x", "--prompt", "512"]),
        (["env", "HF_TOKEN=two words"], ["env", f"HF_TOKEN={MASK}"]),
        (["x", "/home/alice/m", "https://u:pw@h"], ["x", "~/m", f"https://u:{MASK}@h"]),
    ]:
        assert mask_command(argv) == masked, (argv, masked)


def test_the_value_of_a_setting_is_hidden_by_its_name():
    for name, value, hidden in [
        ("api_key", "abc", MASK),
        ("hf_token", 12345678, MASK),
        ("max_num_batched_tokens", 8192, 8192),
        ("model", "/home/alice/m", "~/m"),
        ("prompt", "hello", MASK),
        ("enforce_eager", True, True),
        ("api_key", None, None),
    ]:
        assert mask_value(name, value) == hidden, (name, value, hidden)


def test_masking_is_off_only_inside_unmasked():
    with unmasked():
        assert mask("api_key=abc") == "api_key=abc"
        assert mask_command(["--api-key", "abc"]) == ["--api-key", "abc"]
        assert mask_value("api_key", "abc") == "abc"

    assert mask("api_key=abc") == "api_key=***"


SIZE = st.builds(
    "{:.2f} {}".format, st.floats(0, 10**6), st.sampled_from(["GiB", "MiB", "KiB", "bytes"])
)
NUMBER = re.compile(r"\d+(?:\.\d+)?")


@settings(deadline=None)
@given(
    st.lists(SIZE, min_size=7, max_size=7),
    st.integers(0, 10**7),
    st.sampled_from(["", "/home/alice/", "prompt: 'x' "]),
)
def test_masking_keeps_the_numbers_of_allocator_messages(sizes, pid, before):
    message = (
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate {0}. GPU 0 has a total capacity of {1} of which {2} is "
        "free. Process {pid} has {3} memory in use. Including non-PyTorch memory, this process has {4} memory in use. Of the "
        "allocated memory {5} is allocated by PyTorch, and {6} is reserved by PyTorch but unallocated."
    ).format(*sizes, pid=pid)

    assert NUMBER.findall(mask(f"{before}{message}")) == NUMBER.findall(message)
    assert mask(message) == message


PIECES = st.sampled_from(
    [
        "api_key",
        "--hf-token",
        "prompt",
        "messages",
        "token",
        "=",
        ": ",
        " ",
        "'",
        '"',
        "\\",
        "[",
        "]",
        "{",
        "(",
        ")",
        ",",
        "abc1",
        "8192",
        "/home/",
        "C:\\Users\\",
        "https://",
        "@",
        ":",
        "\n",
        "Bearer ",
        "***",
        "~",
        "hf_",
        "-",
        "content",
        "name: ",
        "value",
    ]
)


@settings(deadline=None, max_examples=100)
@given(st.lists(PIECES, max_size=30).map("".join))
def test_masking_twice_equals_masking_once(text):
    assert mask(mask(text)) == mask(text)


def test_a_long_line_takes_no_long_time():
    for piece in [
        "prompt=[",
        "token ",
        "a-",
        "https://",
        "'",
        "\\",
        "reqinput(",
        "name: ",
        "C:\\Users\\a ",
        "/a",
    ]:
        began = time.process_time()
        mask(piece * (6000 // len(piece)))

        assert time.process_time() - began < 2, piece


def test_a_command_to_paste_keeps_its_home_folders_and_no_secret():
    command = ["python", "/home/alice/job.py", "--api-key", "sk-abcdefghijklmnopqrstuvwx"]
    assert mask_command(command, keep_homes=True) == [
        "python",
        "/home/alice/job.py",
        "--api-key",
        "***",
    ]
    assert mask_command(command)[1] == "~/job.py"


def test_the_file_of_an_input_flag_is_shown_and_a_prompt_is_not():
    assert mask("oomguard run --input in.txt -- vllm serve m").count(" in.txt ") == 1
    assert mask_command(["run", "--input", "in", "--input=in.txt"])[2:] == ["in", "--input=in.txt"]
    assert mask('gen --input "the patient has"') == 'gen --input "***"'
    assert mask_command(["gen", "--input", "the patient has"]) == ["gen", "--input", "***"]
