import subprocess
import sys

import pytest

from elastic.config import EngineConfig
from elastic.engine import create_engine
from elastic.model.config import ModelConfigError, Qwen3Config


def test_an_unknown_kind_names_what_is_installed():
    with pytest.raises(ValueError, match=r"engine\.kind: no engine 'warp'; installed: .*torch"):
        create_engine(Qwen3Config().to_dict(), EngineConfig(kind="warp"))


def test_an_unsupported_model_is_refused_by_name():
    with pytest.raises(ModelConfigError, match="model_type"):
        create_engine({"model_type": "llama"}, EngineConfig())


def test_a_cache_that_holds_no_sequence_is_refused():
    with pytest.raises(ValueError, match=r"kv_blocks: 3 blocks of 16 tokens hold less than max_context_tokens=64"):
        create_engine(Qwen3Config().to_dict(), EngineConfig(device="cpu", kv_blocks=3, max_context_tokens=64))


def test_importing_the_room_does_not_import_torch():
    code = "import sys, elastic.engine, elastic.engine.base; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0
