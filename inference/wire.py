"""Plain data that crosses between the web, the commands and the model processes. Frozen; nothing here computes."""
from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

Kind = Literal["embedding", "reranker"]
Lane = Literal["interactive", "bulk"]
State = Literal["cold", "loading", "ready", "failed", "stale"]
"""stale: its worker is gone, or has made no progress for longer than a request may take."""
InputType = Literal["query", "document"]

STAGES = ("tokenize", "queue", "forward", "encode")
"""What a job goes through: text to ids, waiting, the model (other jobs' packs between its own included), and its vectors' last touch."""

Item = str | tuple[int, ...]
"""One thing to embed: a text, or token ids that are used verbatim."""


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """What the web needs to know of a model without having it."""

    id: str                                   # the name it is served under: the basename of its source
    aliases: tuple[str, ...]                  # other names it answers to: the full repository id, configured aliases
    kind: Kind
    family: str                               # config.json's model_type
    revision: str                             # of a hub snapshot, else ""
    weights_hash: str                         # sha256, hex, over the weight files and what else of the files changes a vector
    dims: int                                 # native width of a vector
    max_length: int                           # tokens, special ones included
    vocab_size: int                           # 0: unknown, ids are not checked
    pooling: str                              # cls | mean | max | lasttoken; none of a multi-vector model
    normalize: float                          # p of the norm; -1 none, 0 max-absolute int16, 2 euclidean
    prompts: Mapping[str, str] = field(default_factory=dict)   # config_sentence_transformers.json
    images: bool = False
    multi_vector: bool = False
    instructions: bool = False                # `instruction` has an effect
    scoring: str = ""                         # of a reranker: sequence_classifier | generative_text
    backend: str = ""                         # host | mlx
    precision: str = ""                       # f32 | bf16 | ...
    provider: str = ""                        # who multiplies matrices on the host backend
    state: State = "cold"
    parameters: int = 0                       # number of weights; 0: not counted yet
    bytes: int = 0                            # size of the weight files

    def answers_to(self, name: str) -> bool:
        return name == self.id or name in self.aliases


@dataclass(frozen=True, slots=True)
class EmbedJob:
    """Items to embed with one model. `timeout` is in seconds from now; None takes the configured one.

    input_type: what the items are to a multi-vector model, which reads queries and documents differently; None: documents. Other
    models read all texts alike: their prompts are the caller's.
    """

    items: tuple[Item, ...]
    model: str | None = None
    dimensions: int | None = None             # keep the first n components, then normalise again
    instruction: str | None = None            # for families that document a format (`instructions` of the spec); others ignore it
    input_type: InputType | None = None
    normalize: float | None = None            # None: as the checkpoint says
    truncate: bool = True                     # False: an item over max_length is an InvalidRequest naming it
    lane: Lane = "interactive"
    timeout: float | None = None
    partial: bool = False                     # True: a failing item lands in `EmbedResult.errors`, the others go on


@dataclass(frozen=True, slots=True)
class EmbedResult:
    """Vectors of a job's items, in order, rows laid end to end.

    data   [R, D] f32   item i owns rows[i] of them: 1, or one per token for a multi-vector model, or 0 where it failed
    rows   [N] int32
    tokens [N] int32    real tokens the model saw, special ones included
    """

    model: str
    data: np.ndarray
    rows: np.ndarray
    tokens: np.ndarray
    multi_vector: bool = False
    truncated: tuple[int, ...] = ()           # indices of items cut to max_length
    errors: Mapping[int, str] = field(default_factory=dict)
    timings: Mapping[str, float] = field(default_factory=dict)  # seconds this job spent in each of STAGES, where it is known

    def vectors(self) -> list[np.ndarray]:
        """[rows[i], D] per item."""
        return np.split(self.data, np.cumsum(self.rows)[:-1]) if len(self.rows) else []


@dataclass(frozen=True, slots=True)
class RerankJob:
    """One query against documents, with one reranker. `timeout` as in EmbedJob."""

    query: str
    documents: tuple[str, ...]
    model: str | None = None
    instruction: str | None = None            # generative rerankers only
    raw_scores: bool = False                  # logits instead of probabilities
    lane: Lane = "interactive"
    timeout: float | None = None


@dataclass(frozen=True, slots=True)
class RerankResult:
    """scores [N] f32: of each document, in the job's order; probabilities in [0, 1] unless raw. tokens [N] int32: of each pair."""

    model: str
    scores: np.ndarray
    tokens: np.ndarray
    truncated: tuple[int, ...] = ()           # indices of documents whose pair was cut to max_length
    timings: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class SplitJob:
    """Texts to cut into passages of at most `tokens` tokens: what `InferenceClient.split` is asked, as it travels."""

    texts: tuple[str, ...]
    tokens: int
    overlap: int = 0
    prompt: str = ""
    model: str | None = None
    lane: Lane = "bulk"
    timeout: float | None = None


@dataclass(frozen=True, slots=True)
class Span:
    """A passage of a text: characters [start, end), and how many tokens a model sees of it, special ones included."""

    start: int
    end: int
    tokens: int
