"""Fields that clients of other servers send, and that are taken here though nothing is done with them: what they say
changes no answer, or is what is done anyway."""

from __future__ import annotations

from typing import Any

#: Not looked at, whatever they say.
UNUSED = frozenset(
    (
        # OpenAI's: what is kept, billed or watched there
        *("store", "prompt_cache_retention", "prompt_cache_options", "verbosity"),
        # llama-server's: where and when a text is made, and what is told beside it
        *("id_slot", "n_keep", "n_discard", "return_progress", "return_tokens"),
        *("speculative.n_min", "speculative.p_min", "speculative.type", "parse_tool_calls", "verbose"),
        # vLLM's: the same, and how it makes a text follow a form
        *("priority", "request_id", "cache_salt", "include_reasoning", "spaces_between_special_tokens"),
        *("guided_decoding_backend", "guided_whitespace_pattern", "kv_transfer_params", "mm_processor_kwargs"),
        # SGLang's: that what is thought comes in the stream as it is made
        "stream_reasoning",
    )
)
#: Taken where they have one of these values.
USUAL: dict[str, tuple[Any, ...]] = {
    # OpenAI's older way to tell of tools
    "function_call": ("none",),
    # llama-server's
    "n_probs": (0,),
    "n_indent": (0,),
    "t_max_predict_ms": (0, -1),
    "post_sampling_probs": (False,),
    "samplers": (["penalties", "dry", "top_n_sigma", "top_k", "typ_p", "top_p", "min_p", "xtc", "temperature"],),
    "reasoning_in_content": (False,),
    # vLLM's
    "use_beam_search": (False,),
    "early_stopping": (False,),
    "length_penalty": (1, 1.0),
    "documents": ([],),
}


def is_taken(name: str, value: Any) -> bool:
    """Whether a field that no request has here may come nevertheless. A null says what leaving it out says."""
    usual = USUAL.get(name, ())
    return value is None or name in UNUSED or any(value == each and type(value) is type(each) for each in usual)
