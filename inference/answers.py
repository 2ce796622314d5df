"""What every kind of answer says beside its result: tokens used, inputs cut, and where the time went. Pure Python."""
from __future__ import annotations

from .wire import STAGES, EmbedResult, RerankResult


def usage(result: EmbedResult | RerankResult) -> dict[str, int]:
    """OpenAI's `usage`, and `truncated_inputs` where any was cut."""
    tokens = int(result.tokens.sum())
    cut = {"truncated_inputs": len(result.truncated)} if result.truncated else {}
    return {"prompt_tokens": tokens, "total_tokens": tokens, **cut}


def headers(result: EmbedResult | RerankResult) -> dict[str, str]:
    """`x-truncated-inputs` where any was cut, and `Server-Timing` in milliseconds by stage where these are known."""
    timing = ", ".join(f"{stage};dur={result.timings[stage] * 1000:.2f}" for stage in STAGES if stage in result.timings)
    cut = {"x-truncated-inputs": str(len(result.truncated))} if result.truncated else {}
    return {"Server-Timing": timing, **cut} if timing else cut
