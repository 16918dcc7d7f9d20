"""Where a command's server listens, told from its words alone."""

from __future__ import annotations

import sys

from oomguard.engines.server import ListenAddress, address_of


def of(*argv: str) -> ListenAddress | None:
    return address_of(argv, "vllm")


def test_vllm_server_listens_on_its_default_ipv4_port(subtests):
    for program in [
        ("vllm", "serve", "org/model"),
        ("/env/bin/vllm", "serve", "org/model"),
        ("python", "/env/bin/vllm", "serve", "org/model"),
        (sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", "org/model"),
        ("python3.12", "-m", "vllm.entrypoints.api_server"),
    ]:
        with subtests.test(program=program):
            assert of(*program) == ListenAddress("", 8000)


def test_flags_say_otherwise_the_last_one_of_a_kind(subtests):
    for flags, address in [
        ("--port 9000", ListenAddress("", 9000)),
        ("--port=9000 --host=127.0.0.1", ListenAddress("127.0.0.1", 9000)),
        ("--host ::1", ListenAddress("::1", 8000)),
        ("--port 9000 --port 9001", ListenAddress("", 9001)),
        ("--uds /run/vllm.sock --port 9000", ListenAddress(path="/run/vllm.sock")),
        ("--config file.yaml --host 127.0.0.1 --port 9000", ListenAddress("127.0.0.1", 9000)),
    ]:
        with subtests.test(flags=flags, address=address):
            assert of("vllm", "serve", "org/model", *flags.split()) == address


def test_where_nothing_tells_what_is_bound_there_is_no_address(subtests):
    for command in [
        "vllm serve org/model --headless",
        "vllm serve org/model --config file.yaml",
        "vllm serve org/model --config=file.yaml --port 9000",
        "vllm serve org/model --port 0",
        "vllm serve org/model --port 99999",
        "vllm serve org/model --port http",
        f"vllm serve org/model --port {'9' * 5000}",
        "vllm bench serve --port 9000",
        "python -m vllm.entrypoints.openai.run_batch --port 9000",
        "python script.py --port 9000",
        "echo vllm serve",
        "-m vllm.entrypoints.api_server",
        "vllm",
    ]:
        with subtests.test(command=command):
            assert of(*command.split()) is None


def test_an_address_is_shown_as_it_is_written(subtests):
    for address, shown in [
        (ListenAddress("", 8000), "0.0.0.0:8000"),
        (ListenAddress("localhost", 8000), "localhost:8000"),
        (ListenAddress("::", 8000), "[::]:8000"),
        (ListenAddress(path="/run/vllm.sock"), "/run/vllm.sock"),
    ]:
        with subtests.test(address=address, shown=shown):
            assert str(address) == shown


def test_of_an_engine_whose_file_says_nothing_nothing_is_known(subtests):
    for engine in ["sglang", "no such engine"]:
        with subtests.test(engine=engine):
            assert address_of(("vllm", "serve", "org/model"), engine) is None
