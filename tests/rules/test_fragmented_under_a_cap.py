"""A cap with room under it that lies in pieces: fragmentation comes before the cap (what an H100 printed under a quarter of it)."""

import oomguard

PRINTED = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate {asked} GiB. GPU 0 has a total capacity of 79.18 GiB of which "
    "60.88 GiB is free. Including non-PyTorch memory, this process has 18.29 GiB memory in use. 19.79 GiB allowed; Of the allocated "
    "memory 10.67 GiB is allocated by PyTorch, and 7.12 GiB is reserved by PyTorch but unallocated.\n"
)


def causes(text):
    return [cause.id for cause in oomguard.diagnose(text).incidents[0].causes]


def test_room_in_pieces_under_a_cap_comes_before_the_cap():
    assert causes(PRINTED.format(asked="2.96"))[0] == "fragmentation"


def test_a_request_beyond_the_cap_is_the_caps():
    assert causes(PRINTED.format(asked="12.00"))[0] == "utilization_too_low"
