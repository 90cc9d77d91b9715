"""The notebook that runs a guide to distributed training leaves none of its examples out, and none of its mistakes."""

from __future__ import annotations

import ast
import re
from pathlib import Path

SOURCE = Path(__file__).resolve().parents[2] / "examples" / "11_the_guide.py"

EXAMPLES = {
    "PyTorch DistributedDataParallel (DDP)": ["train_ddp", "setup", "cleanup"],
    "Using torchrun": [],
    "Gradient accumulation": ["GradientAccumulationTrainer"],
    "Mixed precision training": ["MixedPrecisionTrainer"],
    "Tensor parallelism (Megatron-LM)": [],
    "A transformer": ["TensorParallelTransformer"],
    "Pipeline parallelism": [],
    "GPipe (micro-batching for pipeline)": ["train_gpipe"],
    "ZeRO (Zero Redundancy Optimizer)": [],
    "DeepSpeed": ["train_with_deepspeed"],
    "Fully Sharded Data Parallel (FSDP)": ["train_fsdp"],
    "3D parallelism (data + tensor + pipeline)": ["train_3d"],
    "Accelerate (Hugging Face)": ["train_with_accelerate"],
    "Horovod": ["train_with_horovod"],
    "Profiling and bottleneck analysis": ["profile_training"],
    "Gradient checkpointing": ["CheckpointedModel"],
    "Overlap communication and computation": ["overlap_communication_computation"],
    "Gradient compression": ["gradient_compression"],
    "Hierarchical all-reduce": ["hierarchical_all_reduce"],
}
"""The guide's examples in its order, and what their functions and classes are called there."""


def sections() -> dict[str, str]:
    """The text of each section of the notebook, by its heading: up to the next heading of any level."""
    text = SOURCE.read_text(encoding="utf-8")
    parts = re.split(r"^# #+ (.+)$", text, flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def test_every_example_of_the_guide_is_present_in_order() -> None:
    found = sections()
    assert [heading for heading in found if heading in EXAMPLES] == list(EXAMPLES)
    for heading, names in EXAMPLES.items():
        cells = found[heading].split("# %%\n")[1:]
        assert cells, f"{heading} has no cell"
        defined = set()
        for cell in cells:
            tree = ast.parse(re.sub(r"^# %.*$", "", cell, flags=re.MULTILINE))
            defined |= {node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.ClassDef)}
        assert defined >= set(names), heading


def test_every_example_states_its_corrections() -> None:
    for heading, text in sections().items():
        if heading in EXAMPLES:
            assert re.search(r"^# - (Completed|Corrected): .*[^ ]", text, re.MULTILINE), heading
