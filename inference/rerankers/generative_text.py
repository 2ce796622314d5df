"""Qwen3-Reranker: a chat model is asked whether a document meets a query, and `yes` is weighed against `no`.

Reference: the model card's recipe on transformers `Qwen3ForCausalLM`, one pair at a time. Only two columns of the output head are ever
computed. Prompts of one request begin alike, and what all prompts of a pack begin with is computed once.
"""
from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType

import numpy as np

from .. import adapters, families, ops
from ..batching import Batch, common_prefix
from ..checkpoint import Checkpoint, read_json
from ..engine import Forward
from ..errors import CheckpointError
from ..opened import Opened
from ..tokenizer import Encoded

SCORING = "generative_text"
INSTRUCTIONS = True
MODEL_TYPES = tuple(name for name, family in families.model_types().items() if hasattr(family, "YesNo"))
ARCHITECTURES = "...ForCausalLM"

PREFIX = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct provided. Note that the "
    'answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n')
CONTENT = "<Instruct>: {instruction}\n<Query>: {query}\n<Document>: {document}"
SUFFIX = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"

SHARED = 16                                        # tokens: a common beginning shorter than this is not worth a segment of its own


def accepts(checkpoint: Checkpoint) -> bool:
    return checkpoint.architecture.endswith("ForCausalLM") and checkpoint.model_type in MODEL_TYPES and not checkpoint.pools


def family(checkpoint: Checkpoint) -> ModuleType:
    return families.model_types()[checkpoint.model_type]


class Pairs:
    """Prompts. Each piece is encoded by itself, and only the content is cut."""

    def __init__(self, opened: Opened) -> None:
        self._tokenizer = opened.tokenizer
        limit = opened.spec.max_length
        self._before, self._after = (piece.ids for piece in self._tokenizer.pieces([PREFIX, SUFFIX], limit + 1))
        scaffold = len(self._before) + len(self._after)
        if scaffold >= limit:
            raise CheckpointError(f"a limit of {limit} tokens leaves no room for query and document: the prompt around them has {scaffold}")
        self._room = limit - scaffold
        answers(opened)                            # without them a checkpoint is refused when it is opened, not when it is loaded

    def __call__(self, query: str, documents: Sequence[str], instruction: str | None) -> list[Encoded]:
        """[L] int32 each."""
        contents = [CONTENT.format(instruction=instruction or INSTRUCTION, query=query, document=document) for document in documents]
        scaffold = len(self._before) + len(self._after)
        return [Encoded(np.concatenate([self._before, piece.ids, self._after]), piece.length + scaffold, piece.exact)
                for piece in self._tokenizer.pieces(contents, self._room)]


def answers(opened: Opened) -> tuple[int, int]:
    """Token ids of yes and no: those of 1_LogitScore/config.json, else what the tokenizer makes of the words."""
    path = opened.checkpoint.root / "1_LogitScore" / "config.json"
    declared = read_json(path, {})
    found = []
    for word, key in (("yes", "true_token_id"), ("no", "false_token_id")):
        token = declared.get(key)
        if token is None:
            if declared:
                raise CheckpointError(f"{path} lacks {key!r} (a token id)")
            ids = opened.tokenizer.pieces([word], 8)[0].ids.tolist()
            if len(ids) != 1:
                raise CheckpointError(f"the tokenizer of {opened.checkpoint.trunk} splits {word!r} into {ids}; a generative reranker "
                                      "answers with one token")
            token = ids[0]
        if type(token) is not int or not 0 <= token < opened.config.vocab_size:
            raise CheckpointError(
                f"the token id of {word!r} is {token!r}; expected one of the vocabulary, 0 to {opened.config.vocab_size - 1}")
        found.append(token)
    return found[0], found[1]


def load(opened: Opened) -> Forward:
    weights = adapters.weights(opened.checkpoint, opened.backend, opened.family.PREFIXES)
    model = opened.family.YesNo(weights, opened.config, *answers(opened))
    weights.close(opened.family.DROPPED)

    def forward(prompts: Sequence[np.ndarray]) -> Sequence[np.ndarray]:
        shared = common_prefix(prompts) if model.shares else 0
        batch = Batch.of(prompts) if shared < SHARED else Batch.continuing(prompts, shared)
        logits = ops.numpy(model(batch))[-len(prompts):]                               # what they share is a segment too, the first
        return list(logits[:, :1] - logits[:, 1:])

    return forward
