"""One `Adapter` per way a LoRA adapter is laid out: random factors on the checkpoint of a case, and what peft makes of it.

`python -m tests.make_golden adapters/NAME` writes tests/golden/adapters/NAME: the adapter, and the hidden rows of a few inputs.
"""
from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from tests.families import CASES, GOLDEN, Case

LENGTHS = (1, 5, 17, 33)


@dataclass(frozen=True, eq=False)
class Adapter:
    """config: arguments of peft's LoraConfig."""

    name: str
    base: str
    config: Mapping[str, Any]

    @property
    def folder(self) -> Path:
        return GOLDEN / "adapters" / self.name

    @property
    def case(self) -> Case:
        return next(case for case in CASES if case.name == self.base)


ADAPTERS = (
    Adapter("bert", "bert", {"r": 4, "lora_alpha": 16, "target_modules": ["query", "value"]}),
    Adapter("bert-patterns", "bert", {
        "r": 4, "lora_alpha": 8, "use_rslora": True, "target_modules": ["key", "dense"], "rank_pattern": {"intermediate.dense": 2},
        "alpha_pattern": {r"layer\.1\.output\.dense": 32}}),
    Adapter("modernbert", "modernbert", {"r": 8, "lora_alpha": 8, "target_modules": ["Wqkv", "Wo", "Wi"]}),
    Adapter("qwen3", "qwen3", {
        "r": 3, "lora_alpha": 6, "target_modules": r".*\.[01]\..*(q_proj|down_proj)", "task_type": "FEATURE_EXTRACTION"}),
)


def make_adapter(adapter: Adapter, folder: Path, seed: int = 0) -> None:
    import torch
    import transformers
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(seed)
    folder.mkdir(parents=True, exist_ok=True)
    base = getattr(transformers, adapter.case.reference).from_pretrained(adapter.case.folder)
    model = get_peft_model(base, LoraConfig(init_lora_weights=False, **adapter.config)).eval()
    model.save_pretrained(folder)
    (folder / "README.md").unlink(missing_ok=True)
    config = json.loads((folder / "adapter_config.json").read_text()) | {"base_model_name_or_path": f"tests/{adapter.base}"}
    (folder / "adapter_config.json").write_text(json.dumps(config, indent=2) + "\n")
    rng = np.random.default_rng(seed)
    inputs = [rng.integers(3, adapter.case.config["vocab_size"], n).tolist() for n in LENGTHS]
    with torch.no_grad():
        hidden = [model(input_ids=torch.tensor([ids])).last_hidden_state[0].numpy() for ids in inputs]
    np.savez_compressed(folder / "reference.npz", ids=np.concatenate(inputs).astype(np.int32), lengths=np.array(LENGTHS, np.int32),
                        hidden=np.concatenate(hidden))
    (folder / "made_by.json").write_text(json.dumps({
        "command": f"python -m tests.make_golden adapters/{adapter.name}", "reference": "peft.LoraConfig, not merged", "seed": seed,
        "libraries": {name: version(name) for name in ("torch", "transformers", "peft")}}, indent=2) + "\n")
