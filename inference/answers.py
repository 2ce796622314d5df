"""What every kind of answer says beside its result: tokens used, inputs cut, and where the time went. Pure Python."""
from __future__ import annotations

from .wire import STAGES, EmbedResult, RerankResult


def usage(result: EmbedResult | RerankResult) -> dict[str, int]:
    """OpenAI's `usage`, and `truncated_inputs` where any was cut."""
    return usage_of(int(result.tokens.sum()), len(result.truncated))


def usage_of(tokens: int, truncated: int) -> dict[str, int]:
    return {"prompt_tokens": tokens, "total_tokens": tokens, **({"truncated_inputs": truncated} if truncated else {})}


def headers(result: EmbedResult | RerankResult) -> dict[str, str]:
    """`x-truncated-inputs` where any was cut, and `Server-Timing` in milliseconds by stage where these are known."""
    timing = ", ".join(f"{stage};dur={result.timings[stage] * 1000:.2f}" for stage in STAGES if stage in result.timings)
    cut = headers_of(len(result.truncated))
    return {"Server-Timing": timing, **cut} if timing else cut


def headers_of(truncated: int) -> dict[str, str]:
    return {"x-truncated-inputs": str(truncated)} if truncated else {}
