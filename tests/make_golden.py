"""Makes tests/golden: tiny random checkpoints and what the reference implementation answers to a few inputs.

    pip install torch transformers sentence-transformers peft
    python -m tests.make_golden [CASE...]

Every input is computed alone, so that no padding and no mask of the reference has to be trusted. Pooling is that of
sentence-transformers. All figures are f32 on the CPU.
"""
from __future__ import annotations

import json
import sys
from copy import deepcopy
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from tests.adapters import ADAPTERS, Adapter, make_adapter
from tests.families import CASES, Case
from tests.late_interaction import LATE, Late, make_late
from tests.rerankers import DOCUMENTS, PAIRINGS, QUERIES, WORDS, Pairing

POOLING = ("cls", "mean", "max", "lasttoken")
LIBRARIES = ("torch", "transformers", "sentence-transformers")


def make(case: Case, folder: Path, seed: int = 0) -> None:
    """Writes config.json, model.safetensors, reference.npz and made_by.json into `folder`."""
    import torch
    import transformers
    from sentence_transformers.sentence_transformer.modules import Pooling

    torch.manual_seed(seed)
    model_class = getattr(transformers, case.reference)
    model = model_class(model_class.config_class(**case.config)).eval()
    if case.reference == "Lfm2Model" and not case.causal:
        centre_convolutions(model)
    rng = np.random.default_rng(seed)
    inputs = [rng.integers(1, case.config["vocab_size"], n).tolist() for n in rng.permutation(case.lengths)]
    if case.pad is not None:
        inputs = [ids + [case.pad] * (max(case.lengths) - len(ids)) for ids in inputs]
    types = [rng.integers(0, 2, len(ids)).tolist() if case.type_ids else [0] * len(ids) for ids in inputs]
    hidden, pooled = [], {mode: [] for mode in POOLING}
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:                       # norms and biases that are not one and zero
                parameter.add_(torch.randn_like(parameter) * 0.1)
        model.save_pretrained(folder)
        dense = make_dense(case, folder)
        for ids, type_ids in zip(inputs, types, strict=True):
            given = {"token_type_ids": torch.tensor([type_ids])} if case.type_ids else {}
            mask = torch.ones(1, len(ids), dtype=torch.long)
            fresh = deepcopy(model)                       # dynamic rope remembers the longest input so far
            answer = fresh(input_ids=torch.tensor([ids]), attention_mask=mask, **given)
            states = answer.last_hidden_state
            if case.head:
                states = fresh.get_submodule(case.head)(states)
                assert torch.allclose(states[:, -1], answer.pooler_output, atol=1e-6)
            hidden.append(states[0].numpy())
            for mode in POOLING:
                features = {"token_embeddings": states, "attention_mask": mask}
                pooled[mode].append(Pooling(states.shape[-1], pooling_mode=mode)(features)["sentence_embedding"][0].numpy())
        if dense:
            pooled["dense"] = [dense({"sentence_embedding": torch.tensor(v)})["sentence_embedding"].numpy() for v in pooled["mean"]]
    np.savez_compressed(
        folder / "reference.npz", ids=np.concatenate(inputs).astype(np.int32), type_ids=np.concatenate(types).astype(np.int32),
        lengths=np.array([len(ids) for ids in inputs], np.int32), hidden=np.concatenate(hidden),
        **{mode: np.stack(vectors) for mode, vectors in pooled.items()})
    (folder / "made_by.json").write_text(json.dumps({
        "command": f"python -m tests.make_golden {case.name}", "reference": f"transformers.{case.reference}", "seed": seed,
        "libraries": {name: version(name) for name in LIBRARIES}}, indent=2) + "\n")


def centre_convolutions(model: Any) -> None:
    """Lfm2Model as Lfm2BidirectionalModel has it: the taps of a convolution stand around the row. Its attention heeds `is_causal`."""
    from torch.nn.functional import conv1d, pad
    from transformers.models.lfm2.modeling_lfm2 import Lfm2ShortConv

    class Centred(Lfm2ShortConv):
        def forward(self, hidden_states: Any, **_: Any) -> Any:
            b, c, x = self.in_proj(hidden_states).transpose(1, 2).chunk(3, 1)
            left = self.conv_kernel_size // 2
            mixed = conv1d(pad(b * x, (left, self.conv_kernel_size - 1 - left)), self.conv.weight, self.conv.bias, groups=x.shape[1])
            return self.out_proj((c * mixed).transpose(1, 2))

    for module in model.modules():
        if isinstance(module, Lfm2ShortConv):
            module.__class__ = Centred


def make_dense(case: Case, folder: Path) -> Any:
    """The Dense modules of a case with their folders and modules.json, as one torch module; None where it has none."""
    import torch
    from sentence_transformers.sentence_transformer.modules import Dense

    built, listed = [], ["Transformer", "Pooling"]
    for options in case.dense:
        activation = getattr(torch.nn, options["activation"])()
        built.append(Dense(**{k: v for k, v in options.items() if k != "activation"}, activation_function=activation))
        subfolder = folder / f"{len(listed)}_Dense"
        subfolder.mkdir(exist_ok=True)
        built[-1].save(str(subfolder))
        listed.append("Dense")
    if not built:
        return None
    (folder / "modules.json").write_text(json.dumps([
        {"idx": i, "name": str(i), "path": f"{i}_{kind}" if i else "", "type": f"sentence_transformers.models.{kind}"}
        for i, kind in enumerate(listed)], indent=2) + "\n")
    return torch.nn.Sequential(*built)


def word_pieces(pairing: Pairing) -> Any:
    """WORDS whole, every other word letter by letter, and the special tokens where the model expects its padding."""
    from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers, processors

    specials = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
    if pairing.config["pad_token_id"] == 1:
        specials[:2] = specials[1::-1]
    letters = [chr(c) for c in range(ord("a"), ord("z") + 1)]
    vocabulary = [*specials, *WORDS, *letters, *(f"##{letter}" for letter in letters), ".", "?"]
    tokenizer = Tokenizer(models.WordPiece({word: i for i, word in enumerate(vocabulary)}, unk_token="[UNK]"))
    tokenizer.normalizer, tokenizer.pre_tokenizer = normalizers.BertNormalizer(), pre_tokenizers.BertPreTokenizer()
    tokenizer.add_special_tokens([AddedToken(word, special=True, normalized=False) for word in specials])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair=pairing.template, special_tokens=[(word, vocabulary.index(word)) for word in ("[CLS]", "[SEP]")])
    return tokenizer


def byte_pieces() -> Any:
    """Bytes, with few merges, among them those of the two answers."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    merges = [("y", "e"), ("ye", "s"), ("n", "o"), ("t", "h"), ("th", "e"), ("\u0120", "the"), ("\u010a", "\u010a"), ("r", "e"), ("a", "r")]
    vocabulary = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *(a + b for a, b in merges)]
    tokenizer = Tokenizer(models.BPE({word: i for i, word in enumerate(vocabulary)}, merges))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    for word in ("<|endoftext|>", "<|im_start|>", "<|im_end|>"):
        tokenizer.add_special_tokens([AddedToken(word, special=True, normalized=False)])
    tokenizer.add_tokens(["<think>", "</think>"])
    return tokenizer


def make_pairing(pairing: Pairing, folder: Path, seed: int = 0) -> None:
    """The same for a reranker: every document with every query, alone. `ids` and `type_ids` are those of transformers' tokenizer, with
    its `longest_first`; `logits` of the classifier, or yes minus no at the last position of the prompt that the model card gives."""
    import torch
    import transformers

    torch.manual_seed(seed)
    model_class = getattr(transformers, pairing.reference)
    model = model_class(model_class.config_class(**pairing.config)).eval()
    classifier = pairing.scoring == "sequence_classifier"
    (word_pieces(pairing) if classifier else byte_pieces()).save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"model_max_length": pairing.max_length}) + "\n")
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"))
    ids, types, logits = [], [], []
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(torch.randn_like(parameter) * 0.1)
        model.save_pretrained(folder)
        for query in QUERIES:
            for document in DOCUMENTS:
                if classifier:
                    encoded = tokenizer(query, document, truncation="longest_first", max_length=pairing.max_length,
                                        return_token_type_ids=True)
                    row, kinds = encoded["input_ids"], encoded["token_type_ids"]
                    known = {"token_type_ids": torch.tensor([kinds])} if pairing.reference.startswith("Bert") else {}
                    logit = model(input_ids=torch.tensor([row]), **known).logits[0, 0]
                else:
                    row = prompt(tokenizer, query, document, pairing)
                    kinds = [0] * len(row)
                    yes, no = (tokenizer.convert_tokens_to_ids(word) for word in ("yes", "no"))
                    last = model(input_ids=torch.tensor([row])).logits[0, -1]
                    logit = last[yes] - last[no]
                ids.append(row)
                types.append(kinds)
                logits.append(float(logit))
    np.savez_compressed(
        folder / "reference.npz", ids=np.concatenate(ids).astype(np.int32), type_ids=np.concatenate(types).astype(np.int32),
        lengths=np.array([len(row) for row in ids], np.int32), logits=np.array(logits, np.float32))
    (folder / "made_by.json").write_text(json.dumps({
        "command": f"python -m tests.make_golden rerankers/{pairing.name}", "reference": f"transformers.{pairing.reference}", "seed": seed,
        "libraries": {name: version(name) for name in LIBRARIES[:2]}}, indent=2) + "\n")


def prompt(tokenizer: Any, query: str, document: str, pairing: Pairing) -> list[int]:
    """As the card of Qwen3-Reranker builds it: the content alone is cut."""
    prefix = (
        "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct provided. "
        'Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n')
    suffix = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
    task = pairing.instruction or "Given a web search query, retrieve relevant passages that answer the query"
    before, after = (tokenizer.encode(text, add_special_tokens=False) for text in (prefix, suffix))
    content = tokenizer(f"<Instruct>: {task}\n<Query>: {query}\n<Document>: {document}", truncation="longest_first",
                        max_length=pairing.max_length - len(before) - len(after))["input_ids"]
    return [*before, *content, *after]


def main(names: list[str]) -> None:
    cases = {case.name: case for case in CASES} | {f"rerankers/{pairing.name}": pairing for pairing in PAIRINGS}
    cases |= {f"late/{case.name}": case for case in LATE} | {f"adapters/{adapter.name}": adapter for adapter in ADAPTERS}
    if unknown := set(names) - set(cases):
        raise SystemExit(f"no case is called {', '.join(sorted(unknown))}; known: {', '.join(cases)}")
    for name in names or cases:
        case = cases[name]
        case.folder.mkdir(parents=True, exist_ok=True)
        if isinstance(case, Pairing):
            make_pairing(case, case.folder)
        elif isinstance(case, Late):
            make_late(case, case.folder)
        elif isinstance(case, Adapter):
            make_adapter(case, case.folder)
        else:
            make(case, case.folder)
        print(name, {path.name: path.stat().st_size for path in sorted(case.folder.rglob("*.*"))})


if __name__ == "__main__":
    main(sys.argv[1:])
