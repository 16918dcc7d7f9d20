"""A small engine in the shape of vLLM's: front ends here, a core in a spawned process, the same words when memory runs short.

What a guard needs of vLLM is here and no more: where a start goes through, that the core loads the plugin and logs its
error, and that the caller only gets "See root cause above". ``FAKE_DIES`` says how the core dies where it is not of memory.
"""

from vllm.entrypoints import LLM

__version__ = "0.32.0"
__all__ = ["LLM"]
