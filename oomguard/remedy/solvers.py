"""All solvers that a fix of a rule may name, whatever their numbers come from."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from oomguard.remedy.allocator_options import options_for_pieces
from oomguard.remedy.beside_pool import kv_bytes_for_tried, static_share_for_tried, utilization_for_tried
from oomguard.remedy.captured_graphs import graphs_that_were_captured
from oomguard.remedy.counted_graphs import without_graph_estimate, without_graphs
from oomguard.remedy.host_cache import host_cache_within_free, host_ratio_within_free
from oomguard.remedy.more_ranks import ranks_for_weights
from oomguard.remedy.printed import PRINTED, Solver
from oomguard.remedy.requests_in_pool import requests_in_pool, requests_in_table
from oomguard.remedy.static_share import static_share_for_pool
from oomguard.remedy.step_tokens import step_tokens_for_tried
from oomguard.remedy.whole_pages import page_for_requests

SOLVERS: Final[Mapping[str, Solver]] = {
    **PRINTED,
    "utilization_for_tried": utilization_for_tried,
    "kv_bytes_for_tried": kv_bytes_for_tried,
    "static_share_for_tried": static_share_for_tried,
    "graphs_that_were_captured": graphs_that_were_captured,
    "host_cache_within_free": host_cache_within_free,
    "host_ratio_within_free": host_ratio_within_free,
    "options_for_pieces": options_for_pieces,
    "page_for_requests": page_for_requests,
    "ranks_for_weights": ranks_for_weights,
    "requests_in_pool": requests_in_pool,
    "requests_in_table": requests_in_table,
    "static_share_for_pool": static_share_for_pool,
    "step_tokens_for_tried": step_tokens_for_tried,
    "without_graph_estimate": without_graph_estimate,
    "without_graphs": without_graphs,
}
