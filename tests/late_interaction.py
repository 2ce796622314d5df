"""One `Late` per layout and trunk of late interaction: tiny random checkpoints, and what sentence-transformers makes of a few texts.

`python -m tests.make_golden late/NAME` writes them to tests/golden/late/<name>: the whole checkpoint, tokenizer included, and
reference.npz with the rows of every query and document, each encoded by itself.
"""
from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from tests.families import GOLDEN

TEXTS = (
    "how do plants make sugar", "a", "Boats: sail, against the wind! (slowly)", "?!", "unused0 [unused0] and [Q] are words, [MASK] is one",
    "the quick brown fox jumps over the lazy dog, then it sleeps; " * 6, "x-y, 3.14 % of $5", "naïve café — déjà vu",
)


@dataclass(frozen=True, eq=False)
class Late:
    """settings: of config_sentence_transformers.json (pylate), artifact.metadata (colbert-ir), or of the modules (native)."""

    name: str
    layout: str                                    # pylate | native | colbert-ir
    reference: str
    config: Mapping[str, Any]
    tokenizer: str                                 # wordpiece | unigram | bytes
    settings: Mapping[str, Any] = field(default_factory=dict)
    dense: tuple[Mapping[str, Any], ...] = ({"out_features": 16, "bias": False, "activation": "Identity"},)
    both_ways: bool = False

    @property
    def folder(self) -> Path:
        return GOLDEN / "late" / self.name


_BERT = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "max_position_embeddings": 100,
         "initializer_range": 0.2}
_MODERNBERT = _BERT | {"num_hidden_layers": 3, "local_attention": 16, "max_position_embeddings": 400}
_LFM2 = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2,
         "layer_types": ["conv", "full_attention", "conv"], "block_auto_adjust_ff_dim": False, "initializer_range": 0.2}
_MARKED = {"query_prefix": "[Q] ", "document_prefix": "[D] "}

LATE = (
    Late("bert-pylate", "pylate", "BertModel", _BERT, "wordpiece", _MARKED | {
        "query_length": 32, "document_length": 60, "do_query_expansion": True, "attend_to_expansion_tokens": False,
        "skiplist_words": list(".,;:!?()"), "model_type": "ColBERT"}),
    Late("bert-pylate-defaults", "pylate", "BertModel", _BERT, "wordpiece", {
        "query_prefix": "[unused0] ", "document_prefix": "[unused1] ", "prompts": {"query": "search: "}}),
    Late("bert-colbert-ir", "colbert-ir", "BertModel", _BERT, "wordpiece", {
        "query_maxlen": 16, "doc_maxlen": 50, "query_token_id": "[unused0]", "doc_token_id": "[unused1]", "mask_punctuation": True,
        "attend_to_mask_tokens": False, "similarity": "cosine", "dim": 16}),
    Late("xlm-roberta-pylate", "pylate", "XLMRobertaModel", _BERT | {"type_vocab_size": 1}, "unigram", _MARKED | {
        "query_length": 24, "document_length": 40, "attend_to_expansion_tokens": True, "skiplist_words": [".", ",", "nothing"]}),
    Late("xlm-roberta-colbert-ir", "colbert-ir", "XLMRobertaModel", _BERT | {"type_vocab_size": 1}, "unigram", {
        "attend_to_mask_tokens": True, "mask_punctuation": False}),
    Late("modernbert-pylate", "pylate", "ModernBertModel", _MODERNBERT, "bytes", _MARKED | {
        "query_length": 40, "document_length": 120, "do_query_expansion": True, "model_type": "ColBERT"},
        dense=({"out_features": 48, "bias": False, "activation": "Identity", "use_residual": True},
               {"out_features": 24, "bias": False, "activation": "Identity"})),
    Late("modernbert-native", "native", "ModernBertModel", _MODERNBERT, "bytes", {
        "prompts": {"query": "query: ", "document": "passage: "}, "document_length": 70, "query_length": 60,
        "query_expansion": {"strategy": "min", "length": 20, "attend": False}, "skiplist_words": ["!", ","],
        "skiplist_tasks": ["query", "document"]}),
    Late("bert-native-bare", "native", "BertModel", _BERT, "wordpiece", {"skiplist_words": [], "normalize": False}),
    Late("lfm2-pylate", "pylate", "Lfm2Model", _LFM2, "bytes", _MARKED | {
        "query_length": 32, "document_length": 64, "do_query_expansion": True, "model_type": "ColBERT"}),
    Late("lfm2-pylate-both-ways", "pylate", "Lfm2Model", _LFM2 | {"is_causal": False}, "bytes", _MARKED | {
        "query_length": 32, "document_length": 64, "do_query_expansion": False, "model_type": "ColBERT"}, both_ways=True),
)


def make_late(case: Late, folder: Path, seed: int = 0) -> None:
    import torch
    import transformers
    from sentence_transformers import MultiVectorEncoder

    from tests.make_golden import centre_convolutions

    torch.manual_seed(seed)
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = make_tokenizer(case)
    tokenizer.save_pretrained(folder)
    model_class = getattr(transformers, case.reference)
    config = model_class.config_class(
        vocab_size=len(tokenizer), pad_token_id=tokenizer.pad_token_id, bos_token_id=None, eos_token_id=None, **case.config)
    trunk = model_class(config).eval()
    with torch.no_grad():
        for parameter in trunk.parameters():
            if parameter.ndim == 1:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    trunk.save_pretrained(folder)
    {"pylate": write_pylate, "native": write_native, "colbert-ir": write_colbert_ir}[case.layout](case, folder, config.hidden_size)
    encoder = MultiVectorEncoder(str(folder), device="cpu")
    if case.both_ways:
        centre_convolutions(encoder[0].model if hasattr(encoder[0], "model") else encoder[0].auto_model)
    rows: dict[str, np.ndarray] = {}
    for i, text in enumerate(TEXTS):
        rows[f"query{i}"] = encoder.encode_query(text, convert_to_numpy=True)
        rows[f"document{i}"] = encoder.encode_document(text, convert_to_numpy=True)
    np.savez_compressed(folder / "reference.npz", **rows)
    (folder / "made_by.json").write_text(json.dumps({
        "command": f"python -m tests.make_golden late/{case.name}", "reference": "sentence_transformers.MultiVectorEncoder", "seed": seed,
        "libraries": {name: version(name) for name in ("torch", "transformers", "sentence-transformers")}}, indent=2) + "\n")


def make_tokenizer(case: Late) -> Any:
    """A tokenizer of the trunk's kind over letters: words fall into pieces, punctuation stands by itself."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    letters = [chr(c) for c in range(33, 127)]
    words = ["plants", "make", "sugar", "the", "wind", "how", "do", "and", "unused"]
    if case.tokenizer == "wordpiece":
        special = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]", "mask_token": "[MASK]"}
        pieces = [*special.values(), "[unused0]", "[unused1]", *letters, *(f"##{c}" for c in letters if c.isalnum()), *words]
        built = Tokenizer(models.WordPiece({p: i for i, p in enumerate(dict.fromkeys(pieces))}, unk_token="[UNK]"))
        built.normalizer = normalizers.BertNormalizer(lowercase=True)
        built.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
        first, last = "[CLS]", "[SEP]"
    elif case.tokenizer == "unigram":
        special = {"bos_token": "<s>", "pad_token": "<pad>", "eos_token": "</s>", "unk_token": "<unk>", "mask_token": "<mask>"}
        pieces = [*special.values(), "[unused0]", "[unused1]", "▁", *letters, *(f"▁{w}" for w in words)]
        built = Tokenizer(models.Unigram([(p, -1.0 if len(p) > 1 else -2.0) for p in pieces], unk_id=3))
        built.pre_tokenizer = pre_tokenizers.Metaspace()
        first, last = "<s>", "</s>"
    else:
        special = ({"bos_token": "<|startoftext|>", "eos_token": "<|im_end|>", "pad_token": "<|pad|>"} if "lfm2" in case.name else
                   {"unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]", "pad_token": "[PAD]", "mask_token": "[MASK]"})
        pieces = [*special.values(), *sorted(pre_tokenizers.ByteLevel.alphabet()), "Ġt", "he", "Ġthe"]
        built = Tokenizer(models.BPE({p: i for i, p in enumerate(pieces)}, [("Ġ", "t"), ("h", "e"), ("Ġt", "he")]))
        built.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        built.decoder = decoders.ByteLevel()
        first, last = ("<|startoftext|>", None) if "lfm2" in case.name else ("[CLS]", "[SEP]")
    built.add_special_tokens(list(special.values()))
    ends = [token for token in (first, last) if token]
    built.post_processor = processors.TemplateProcessing(
        single=f"{first} $A" + (f" {last}" if last else ""), special_tokens=[(t, built.token_to_id(t)) for t in ends])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=built, model_max_length=90, **special)
    if "query_prefix" in case.settings and "unused" not in case.settings["query_prefix"]:      # as PyLate adds them
        tokenizer.add_tokens([AddedToken(case.settings["query_prefix"]), AddedToken(case.settings["document_prefix"])])
    return tokenizer


def _dense(case: Late, width: int) -> list[Any]:
    import torch
    from sentence_transformers.sentence_transformer.modules import Dense

    built = []
    for options in case.dense:
        activation = getattr(torch.nn, options["activation"])()
        built.append(Dense(in_features=width, activation_function=activation, module_input_name="token_embeddings",
                           **{k: v for k, v in options.items() if k != "activation"}))
        width = options["out_features"]
    return built


def write_pylate(case: Late, folder: Path, width: int) -> None:
    listed = [{"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"}]
    for i, module in enumerate(_dense(case, width), 1):
        path = folder / f"{i}_Dense"
        path.mkdir(exist_ok=True)
        module.save(str(path))
        config = json.loads((path / "config.json").read_text())
        (path / "config.json").write_text(json.dumps({k: v for k, v in config.items() if not k.startswith("module_")}, indent=2) + "\n")
        listed.append({"idx": i, "name": str(i), "path": f"{i}_Dense", "type": "pylate.models.Dense.Dense"})
    (folder / "modules.json").write_text(json.dumps(listed, indent=2) + "\n")
    (folder / "config_sentence_transformers.json").write_text(json.dumps(case.settings | {"similarity_fn_name": "MaxSim"}, indent=2) + "\n")
    (folder / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": 59, "do_lower_case": False}) + "\n")


def write_native(case: Late, folder: Path, width: int) -> None:
    from sentence_transformers import MultiVectorEncoder
    from sentence_transformers.base.modules import Normalize, Transformer
    from sentence_transformers.multi_vector_encoder.modules import MultiVectorMask

    knobs = {name: case.settings[name] for name in ("query_length", "document_length", "query_expansion") if name in case.settings}
    mask = MultiVectorMask(case.settings["skiplist_words"], skiplist_tasks=case.settings.get("skiplist_tasks"))
    modules = [Transformer(str(folder), **knobs), *_dense(case, width), mask]
    if case.settings.get("normalize", True):
        modules.append(Normalize("token_embeddings"))
    MultiVectorEncoder(modules=modules, device="cpu", prompts=case.settings.get("prompts")).save_pretrained(
        str(folder), create_model_card=False)


def write_colbert_ir(case: Late, folder: Path, width: int) -> None:
    from safetensors.numpy import load_file, save_file

    prefix = {"BertModel": "bert.", "XLMRobertaModel": "roberta."}[case.reference]
    tensors = {prefix + name: x for name, x in load_file(folder / "model.safetensors").items()}
    projection = np.random.default_rng(0).standard_normal((case.dense[0]["out_features"], width)).astype(np.float32)
    save_file(tensors | {"linear.weight": projection}, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"architectures": ["HF_ColBERT"]}, indent=2) + "\n")
    (folder / "artifact.metadata").write_text(json.dumps(case.settings, indent=2) + "\n")
