"""Makes tests/golden: tiny random checkpoints and what the reference implementation answers to a few inputs.

    pip install torch transformers sentence-transformers
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

from tests.families import CASES, Case

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


def main(names: list[str]) -> None:
    unknown = set(names) - {case.name for case in CASES}
    if unknown:
        raise SystemExit(f"no case is called {', '.join(sorted(unknown))}; known: {', '.join(case.name for case in CASES)}")
    for case in CASES:
        if not names or case.name in names:
            case.folder.mkdir(parents=True, exist_ok=True)
            make(case, case.folder)
            print(case.name, {path.name: path.stat().st_size for path in sorted(case.folder.iterdir())})


if __name__ == "__main__":
    main(sys.argv[1:])
