"""What must be masked in a command, its environment or a log line, and what looks like it and must not be."""

from __future__ import annotations

import json
import shlex
import time
import tomllib
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

import oomguard.core
from oomguard.core.redact import mask, mask_command, token_rests

LOWER = "a1b2c3d4e5f60718" * 5  # hexadecimal too
MIXED = "aB3dE5fG7hJ9kL1m" * 5
UPPER = "A2B3C4D5E6F7G2H3"
PASSWORD = "Hunter2!x"

# Each holds SECRET once or more, as one shell line; {…} are the secrets above.
TOKENS = (
    f"gsk_{MIXED[:52]}",
    f"r8_{MIXED[:37]}",
    f"npm_{MIXED[:36]}",
    f"SG.{MIXED[:22]}.{MIXED[:43]}",
    f"hf_{MIXED[:34]}",
    f"api_org_{MIXED[:34]}",
    f"sk-{MIXED[:48]}",
    f"sk-proj-{MIXED[:60]}",
    f"sk-ant-api03-{MIXED}",
    f"sk-or-v1-{LOWER[:64]}",
    f"xai-{MIXED[:70]}",
    f"csk-{LOWER[:48]}",
    f"tgp_v1_{MIXED[:43]}",
    f"fw_{MIXED[:24]}",
    f"pcsk_{MIXED[:60]}",
    f"lsv2_pt_{LOWER[:32]}_{LOWER[:10]}",
    f"esecret_{MIXED[:26]}",
    f"nvapi-{MIXED[:64]}",
    f"pplx-{MIXED[:48]}",
    f"jina_{LOWER[:32]}{MIXED[:24]}",
    f"ghp_{MIXED[:36]}",
    f"ghs_{MIXED[:36]}",
    f"github_pat_{MIXED[:22]}_{MIXED[:59]}",
    f"glpat-{MIXED[:20]}",
    f"gldt-{MIXED[:20]}",
    f"glrt-{MIXED[:20]}",
    f"pypi-AgEIcHlwaS5vcmc{MIXED[:60]}",
    f"rubygems_{LOWER[:48]}",
    f"dckr_pat_{MIXED[:27]}",
    f"xkeysib-{LOWER[:64]}-{MIXED[:16]}",
    f"re_{MIXED[:8]}_{MIXED[:24]}",
    f"xoxb-{'1' * 12}-{MIXED[:24]}",
    f"xapp-1-{UPPER[:11]}-{'1' * 12}-{LOWER[:64]}",
    f"AKIA{UPPER}",
    f"ASIA{UPPER}",
    f"LTAI{MIXED[:20]}",
    f"AIza{MIXED[:35]}",
    f"ya29.{MIXED[:60]}",
    f"GOCSPX-{MIXED[:28]}",
    f"dapi{LOWER[:32]}",
    f"dop_v1_{LOWER[:64]}",
    f"hvs.{MIXED[:40]}",
    f"dp.pt.{MIXED[:43]}",
    f"ATATT3x{MIXED[:60]}",
    f"ntn_{'1' * 11}{MIXED[:35]}",
    f"figd_{MIXED[:40]}",
    f"lin_api_{MIXED[:40]}",
    f"sk_live_{MIXED[:24]}",
    f"rk_test_{MIXED[:24]}",
    f"shpat_{LOWER[:32]}",
    f"NRAK-{UPPER}{UPPER[:11]}",
    f"glsa_{MIXED[:32]}_{LOWER[:8]}",
    f"sntryu_{LOWER[:64]}",
    f"PMAK-{LOWER[:24]}-{LOWER[:34]}",
    f"pul-{LOWER[:40]}",
    f"sbp_{LOWER[:40]}",
    f"tskey-auth-{MIXED[:20]}",
    f"eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIx{MIXED[:20]}.{MIXED[:43]}",
    f"AGE-SECRET-KEY-1{UPPER * 3}",
    f"sha256~{MIXED[:43]}",
    f"{'1' * 9}:AA{MIXED[:33]}",
)
LINES = (
    # variables
    "FOO_KEY={pw} vllm serve m",
    "env DBPASS={pw} vllm serve m",
    "DB_PASS={pw} x",
    "MYSQL_PWD={pw} x",
    "PGPASSWORD={pw} x",
    "REDISCLI_AUTH={pw} x",
    "SMTPPASS={pw} x",
    "ROOTPW={pw} x",
    "GITHUB_PAT={pw} x",
    "MY_JWT={pw} x",
    "WIFI_PSK={pw} x",
    "AWS_SECRET_ACCESS_KEY={pw} x",
    "WANDB_API_KEY={pw} x",
    "VLLM_API_KEY={pw} x",
    "OPENAI_KEY={pw} x",
    "AZURE_CREDS={pw} x",
    "MINIO_ROOT_PASSWORD={pw} x",
    "docker run -e FOO_KEY={pw} image",
    "docker run --env=HF_TOKEN={pw} image",
    "export LANGFUSE_SECRET_KEY={pw}",
    # flags
    "vllm serve m --api-key {pw}",
    "vllm serve m --api-key={pw}",
    "x --auth {pw}",
    "x --auth={pw}",
    "x --key {pw}",
    "x --key={pw}",
    "x --pass {pw}",
    "x --db-pass {pw}",
    "x --hf-token {pw}",
    "x --password {pw}",
    "x --client-secret {pw}",
    "x --basic-auth {pw}",
    "x --tls-key {pw}",
    "x --jwt {pw}",
    "x --dbPassword={pw}",
    "x --accessToken {pw}",
    # flags of programs
    "mysql -h db -p{pw} -e 'select 1'",
    "mysqldump -proot123 --password={pw} db",
    "/usr/bin/mysql -u root -p{pw}",
    "tool -p{pw}",
    "sshpass -p {pw} ssh host",
    "redis-cli -a {pw} ping",
    "mongosh -u me -p {pw}",
    "docker login -u me -p {pw} registry",
    "ldapsearch -D cn=me -w {pw}",
    "unzip -P {pw} x.zip",
    "curl -u user:{pw} https://host/x",
    "curl -uuser:{pw} https://host/x",
    "curl --user user:{pw} https://host/x",
    "curl --user=user:{pw} https://host/x",
    "curl --proxy-user user:{pw} https://host/x",
    "http -u user:{pw} host",
    "curl -sSu user:{pw} https://host/x",
    "curl --user 'user:{pw}' https://host/x",
    "x --login user:{pw}",
    "x --pwd {pw}",
    "JWT={pw} AUTH={pw} x",
    "vllm serve m --api-key first {made} {made} --port 8000",
    "podman login -p={pw} host",
    "kubectl create secret generic x --from-literal=mykey={pw}",
    "kubectl create secret generic x --from-literal mykey={pw}",
    "x --header 'api-key: {pw}'",
    "x -Djavax.net.ssl.keyStorePassword={pw}",
    "x --set auth.password={pw}",
    "OPENAI_APIKEY={pw} x",
    "git clone https://oauth2:{pw}@host/x.git",
    "mysql -uroot -p'{pw}' db",
    "smbclient -U user%{pw} //host/x",
    "7z x -p{pw} a.7z",
    "wandb login {hex}",
    "vault login {hex}",
    "ngrok config add-authtoken {hex}",
    "aws configure set aws_secret_access_key {pw}",
    "openssl rsa -passin pass:{pw} -in k",
    "curl -H 'Authorization: Bearer {hex}' host",
    "curl -H 'Authorization: Basic {b64}' host",
    "curl -H 'X-API-Key: {pw}' host",
    "curl -H 'PRIVATE-TOKEN: {pw}' host",
    "curl -b 'session={pw}' -H 'Cookie: session={pw}' host --cookie session={pw}",
    "KEY={made} x",
    # addresses
    "x https://user:{pw}@host/x",
    "x https://{hex}@github.com/org/x",
    "x 'https://host/x?token={pw}'",
    "x 'https://host/x?a=1&api_key={pw}'",
    "x 'https://host/x?access_token={pw}&b=1'",
    "x 'https://host/x?key={pw}'",
    "x 'https://host/x?auth={pw}'",
    "x 'https://host/x?X-Amz-Signature={hex}'",
    "x 'https://acc.blob.core.windows.net/c?sv=2022&sig={hex}'",
    "x postgresql+psycopg2://user:{pw}@db/x",
    "x redis://:{pw}@host:6379/0",
    "x https://hooks.slack.com/services/T00000000/B00000000/{hex}",
    "x https://discord.com/api/webhooks/123456789/{hex}",
    "x 'DefaultEndpointsProtocol=https;AccountName=a;AccountKey={hex}=='",
    "x 'Server=db;Uid=me;Pwd={pw};'",
    # other notations
    'x \'{{"api_key": "{pw}", "model": "m"}}\'',
    "x '<password>{pw}</password>'",
    "bash -c 'mysql -p{pw} db'",
    "bash -c 'curl -u me:{pw} host && vllm serve m'",
    "ssh host 'FOO_KEY={pw} vllm serve m'",
    "x 'machine host login me password {pw}'",
)
LOG_LINES = (
    "INFO started with {{'auth': '{made}', 'n': 1}}",
    "non-default args: {{'api_key': ['{pw}'], 'key': '{made}', 'model': 'm'}}",
    "vendor_key: {made}",
    "Environment=FOO_KEY={pw}",
    "environ({{'DBPASS': '{pw}', 'HOME': '/root'}})",
    "FOO_KEY: '{pw}'",
    "first line\nFOO_KEY={pw}\n--key {pw}\nmysql -p{pw}\nhf_{made}\ntool -p{pw}",
    "- name: FOO_TOKEN\n  value: {pw}",
    "could not connect to postgres://me:{pw}@db:5432/x",
    "GET /v1/models?api_key={pw}&n=1 HTTP/1.1",
    "headers: {{'authorization': 'Bearer {hex}', 'x-api-key': '{pw}'}}",
)
VALUES = {"pw": PASSWORD, "hex": LOWER[:40], "made": MIXED[:32], "b64": "dXNlcjpwYXNzd29yZDEyMw=="}
SECRET_LINES = (
    *(f"vllm serve m --note {token}" for token in TOKENS),
    *(line.format(**VALUES) for line in LINES),
)

HARMLESS = (
    "vllm serve m --max-model-len 8192",
    "vllm serve m --max-model-len=8192 --max-num-seqs 256",
    "x --port 8000",
    "x -p 8000",
    "docker run -p8000:8000 image",
    "docker run -p 127.0.0.1:8000:8000/tcp image",
    "docker run -p127.0.0.1:8000:8000/tcp image",
    "docker run -u 1000:1000 image",
    "docker run --user app:app image",
    "KEY",
    "KEY=1",
    "PWD=/root x",
    "    --- PASS: TestClassify/CUDA_out_of_memory._Tried_to_allocate_2.00_GiB (0.00s)",
    "x --api-key *** Qwen2.5-7B-Instruct-AWQ --port 8000",
    "x --api-key *** org/Model-8B 9f86d081884c7d659a2feaa0c55ad015a3bf4f1b",
    "cache_key=9f86d081884c7d659a2feaa0c55ad015a3bf4f1b",
    "key=9f86d081884c7d659a2feaa0c55ad015a3bf4f1b",
    "key: 'model.layers.0.self_attn.qkv_proj.weight_scale'",
    "key='Meta-Llama-3-8B-Instruct-AWQ-INT4'",
    "the KEY is missing",
    "x --key-value a=b",
    "x --key-file /etc/ssl/x.pem",
    "x --sort-key name",
    "x --primary-key id",
    "x --no-auth model",
    "x --auth-type basic",
    "x --auth basic",
    "x --auth none",
    "x --enable-auth yes",
    "x --auth --port 8000",
    "x --key /etc/ssl/private/server.key",
    "x --ssl-keyfile /etc/ssl/x.key --ssl-certfile /etc/ssl/x.crt",
    "SSL_KEY=/etc/ssl/server.pem x",
    "PUBLIC_KEY=abc x",
    "FOO_AUTH=1 x",
    "FOO_AUTH=true x",
    "monkey=1",
    "keyboard=us",
    "turkey: 5",
    "tokens=512",
    "max_tokens=16",
    "max_num_batched_tokens=8192",
    "num_tokens: 4096",
    "x --tokenizer org/model",
    "x --tokenizer-mode auto --skip-tokenizer-init",
    "pad_token=<pad> eos_token_id=2",
    "commit 0a9342f4c1d2e3f405162738495a6b7c8d9e0f1a",
    "x --revision 0a9342f4c1d2e3f405162738495a6b7c8d9e0f1a",
    "sha256:9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08",
    "request 123e4567-e89b-12d3-a456-426614174000 aborted",
    "x --request-id 123e4567-e89b-12d3-a456-426614174000",
    "/opt/models/org--Model-8B/snapshots/0a9342f4c1d2e3f4",
    "python3 -u script.py --n 1",
    "python -u -m vllm.entrypoints.openai.api_server --model org/m",
    "sudo -u postgres psql",
    "gcc -pthread -pipe -O2",
    "ffmpeg -pix_fmt yuv420p",
    "java -Pprofile",
    "tar -pxzf x.tgz",
    "if pad := -patches.shape[1] % size:",
    "(-1, 0): -padded_width,",
    "forward_pass=0.31",
    "first_pass=True second-pass: 3",
    "bypass=1 compass=north",
    "passed=5 pass",
    "author=me authority=local authenticated=true",
    "http://localhost:8000/v1?limit=10&key_type=a",
    "http://host/x?code=404",
    "https://user@host/x",
    "git@github.com:org/repo.git",
    "ssh://git@github.com/org/repo",
    "OMP_NUM_THREADS=8 CUDA_VISIBLE_DEVICES=0,1 x",
    "TOKENIZERS_PARALLELISM=false x",
    "HF_HOME=/data/hf TRANSFORMERS_CACHE=/data/hf x",
    "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True x",
    "KeyError: 'model.layers.0.self_attn.k_proj.weight'",
    "FOO_KEY: not set",
    "key='lm_head.weight' shape=[32000, 4096]",
    "hf_transfer is not installed, hf_overrides={}",
    "sk-learn 1.5",
    "npm_config_cache=/x",
    "re_compile took 3 s",
    "r8_e4m3 fp8_e5m2",
    "SG.x",
    "token: the first one is late",
    "longest_request_tokens: not printed",
    "longest_request_tokens=unknown",
    "api_key: not given",
    "Bearer token is missing",
    "Basic PagedAttention understanding",
    "vault login failed",
    "wandb login required",
    "mysql is not installed, -p asks for one",
    "curl -u user https://host",
    "password_file=/run/secrets/db",
    "secret-name: vllm-hf",
    "kv_cache_dtype=fp8 block_size=16",
    "weights took 14.99 GiB, KV cache 3.25 GiB",
)


def leaks(text: str) -> list[str]:
    """The secrets that a text still shows, also in part."""
    parts = {PASSWORD, "Hunter2", LOWER[:16], MIXED[:8], UPPER[:11], VALUES["b64"], "root123"}
    return [part for part in parts if part in text]


def test_there_are_enough_of_both():
    assert len(set(SECRET_LINES)) >= 100
    assert len(set(HARMLESS)) >= 60
    assert all(leaks(line) for line in SECRET_LINES)


def test_a_secret_of_a_shell_line_is_masked():
    for line in SECRET_LINES:
        assert not leaks(mask(line)), line


def test_a_secret_of_a_log_line_is_masked():
    for template in LOG_LINES:
        line = template.format(**VALUES)
        assert leaks(line), line
        assert not leaks(mask(line)), line
        assert not leaks(mask(json.dumps({"message": line}))), line


def test_a_secret_of_a_list_of_words_is_masked():
    for line in SECRET_LINES:
        assert not leaks(" ".join(mask_command(shlex.split(line)))), line


def test_a_secret_is_masked_where_the_words_are_quoted_in_a_log():
    for line in SECRET_LINES:
        words = shlex.split(line)
        assert not leaks(mask(f"INFO 11-21 07:14:27 started {words!r} as pid 7")), line
        assert not leaks(mask(json.dumps({"cmd": line}))), line


def test_what_looks_like_a_secret_is_left_alone():
    for line in HARMLESS:
        assert mask(line) == line, line
        if "'" not in line:
            assert mask_command(line.split(" ")) == line.split(" "), line


def test_masking_twice_is_masking_once():
    for line in SECRET_LINES:
        assert mask(mask(line)) == mask(line), line
        masked = mask_command(shlex.split(line))
        assert mask_command(masked) == masked, line


WORDS = st.sampled_from(
    [
        *LINES,
        *HARMLESS,
        "-p",
        "-u",
        "--key",
        "mysql",
        "docker",
        "login",
        "a:b",
        "=",
        "'",
        '"',
        "\\n",
        "\n",
        "[",
        "gsk_",
        "***",
        "FOO_KEY",
    ]
)


@settings(deadline=None, max_examples=100)
@given(st.lists(WORDS, max_size=8), st.sampled_from(["", " ", "="]))
def test_masking_twice_is_masking_once_whatever_stands_together(words, glue):
    text = glue.join(words)
    assert mask(mask(text)) == mask(text)
    masked = mask_command(text.split(" "))
    assert len(masked) == len(text.split(" "))
    assert mask_command(masked) == masked


def test_every_row_names_its_source():
    table = tomllib.loads((Path(oomguard.core.__file__).parent / "secrets.toml").read_text())

    assert all(row["source"] for kind in ("token", "part", "program") for row in table[kind])


PIECES = [
    *token_rests(),
    "eyJaaaaaaaaa-",
    "a.",
    "://",
    "a:a@",
    "?key=",
    "-p",
    "-u a:",
    "mysql -p",
    "Bearer ",
    "basic ",
    "login a ",
]
PIECES += [
    "A_KEY=",
    "--key ",
    "<token>",
    "a_",
    "A_",
    "-----BEGIN PRIVATE KEY-----",
    ";pwd=",
    "'",
    '"',
    "1" * 16,
    "$1$",
    "docker login ",
]


def test_masking_time_grows_linearly_with_the_text():
    def seconds(piece: str, length: int) -> float:
        text = (piece * (length // len(piece) + 1))[:length]
        began = time.process_time()
        mask(text)
        return time.process_time() - began

    # Eight times the text: quadratic time would be 64 times as much. What takes no time at all is not compared, and what the
    # machine alone may have delayed is measured again.
    for piece in PIECES:
        assert any(
            seconds(piece, 16_000) < max(0.0625, 24 * seconds(piece, 2_000)) for _ in range(3)
        ), piece


def test_every_key_of_a_flag_that_takes_several_is_hidden():
    words = [
        "vllm",
        "serve",
        "m",
        "--api-key",
        "first-key-1111aa",
        "other-key-2222bb",
        "--port",
        "1",
    ]
    shown = mask_command(words)
    assert shown == ["vllm", "serve", "m", "--api-key", "***", "***", "--port", "1"]
