"""Logging as vLLM has it: one handler on standard output, made anew in each process, no propagation."""

import logging
from logging.config import dictConfig


def configure() -> None:
    dictConfig(
        {
            "version": 1,
            "disable_existing_loggers": False,
            "handlers": {"vllm": {"class": "logging.StreamHandler", "stream": "ext://sys.stdout"}},
            "loggers": {"vllm": {"handlers": ["vllm"], "level": "INFO", "propagate": False}},
        }
    )


configure()
init_logger = logging.getLogger
