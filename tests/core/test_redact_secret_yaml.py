"""Secrets whose value is on the lines behind its key, and those of a URL inside a URL."""

from __future__ import annotations

import pytest

from oomguard.core.redact import mask, mask_command


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("api_key:\n  - Zx81kkq0PplMmn27\nport: 80", "api_key:\n  - ***\nport: 80"),
        (
            "hosts:\n  - alpha\napi_key:\n- Zx81kkq0PplMmn27\n- Yy72jjq0PplMmn27",
            "hosts:\n  - alpha\napi_key:\n- ***\n- ***",
        ),
        (
            "db:\n  password: |\n    correct horse\n    battery\n  port: 3",
            "db:\n  password: |\n    ***\n    ***\n  port: 3",
        ),
        ("password: >-\n  hunter2hunter2", "password: >-\n  ***"),
        ("name: |\n  nothing secret\nkeys:\n  - q", "name: |\n  nothing secret\nkeys:\n  - q"),
        (
            "to=postgres%3A%2F%2Fme%3Ahunter22%40host%2Fdb",
            "to=postgres%3A%2F%2Fme%3A***%40host%2Fdb",
        ),
        (
            "https://api.telegram.org/bot987654321:AAE0w3Kd9x2LmPq7Rt5Vn1Bc8Yf4Hs6zzyx/getMe",
            "https://api.telegram.org/bot987654321:***/getMe",
        ),
    ],
)
def test_it_is_masked_and_all_else_stays(text, shown):
    assert mask(text) == shown
    assert mask_command(["program", "--config", text])[2] == shown
