"""What a Hugging Face checkpoint directory has to have, and has, by its config and the headers of its files.

Without the models' library, which takes seconds to import: so that starting a run can check its policy quickly.
"""

import json
import re
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

from safetensors import SafetensorError, safe_open

from elastic.engine.model.config import ModelConfigError, Qwen3Config
from elastic.system.given import read_json

CONFIG_FILE = "config.json"
GENERATION_CONFIG_FILE = "generation_config.json"
WEIGHTS_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
EMBEDDING, TIED = "model.embed_tokens.weight", "lm_head.weight"
PLAIN_TYPES = ("BF16", "F16", "F32", "F64")
"""Types of weights that are values by themselves; quantised ones are some only with their scales."""
BESIDE_WEIGHTS = (".json", ".jinja", ".model", ".txt")
"""How the files end that say what a model is and how it speaks."""
QUANTISATIONS = ("quantization_config", "compression_config")
"""Keys of configs whose weights are quantised; the second is what compressed-tensors wrote before."""
NAME_BYTES = 255
"""The longest name of a file."""
COMPARED_BYTES = 16 * 1024 * 1024
_LENGTH_BYTES = 8
"""The bytes of the header's length, which come before the header of a safetensors file."""
_LAYER = re.compile(r"(?:^|\.)(\d{1,9})\.")
"""The number of a tensor's layer, in its name."""


class CheckpointError(Exception):
    """A checkpoint cannot be read or written, or does not match its config; names the file or tensor."""


class StoredTensor(NamedTuple):
    """What a file's header says of a tensor: its values are the bytes of `path` from `begin` to `end`."""

    path: Path
    type: str
    shape: tuple[int, ...]
    begin: int
    end: int


def read_config(directory: Path) -> Qwen3Config:
    """The model's shape, and the tokens at which it ends, also those of `generation_config.json`. Raises
    `CheckpointError`."""
    raw, more = read_object(directory / CONFIG_FILE), directory / GENERATION_CONFIG_FILE
    config = _read_shape(directory / CONFIG_FILE, raw)
    if not more.exists():
        return config
    ends = with_ends(raw.get("eos_token_id"), read_object(more).get("eos_token_id"))
    return _read_shape(more, {**raw, "eos_token_id": ends})


def _read_shape(path: Path, raw: Mapping[str, Any]) -> Qwen3Config:
    """The model that a config describes, whose part from `path` was not looked at yet."""
    try:
        return Qwen3Config.from_dict(raw)
    except ModelConfigError as error:
        raise CheckpointError(f"{path}: {error}") from error


def with_ends(ends: Any, more: Any) -> Any:
    """Return the end tokens that a model's config and its generation config name together: none, one or a list."""
    found: list[Any] = []
    for said in (ends, more):
        listed = said if isinstance(said, list) else [said]
        found += [one for one in listed if one is not None and one not in found]
    return found[0] if len(found) == 1 else found or None


def parameter_shapes(config: Qwen3Config) -> dict[str, tuple[int, ...]]:
    """Name → shape of every stored parameter; a tied `lm_head.weight` is stored once, as the embedding."""
    hidden, inner, head = config.hidden_size, config.intermediate_size, config.head_dim
    queries, keys = config.num_attention_heads * head, config.num_key_value_heads * head
    layer: dict[str, tuple[int, ...]] = {
        "self_attn.q_proj": (queries, hidden),
        "self_attn.k_proj": (keys, hidden),
        "self_attn.v_proj": (keys, hidden),
        "self_attn.o_proj": (hidden, queries),
        "self_attn.q_norm": (head,),
        "self_attn.k_norm": (head,),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
        "input_layernorm": (hidden,),
        "post_attention_layernorm": (hidden,),
    }
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config.vocab_size, hidden)}
    for number in range(config.num_hidden_layers):
        shapes |= {f"model.layers.{number}.{name}.weight": shape for name, shape in layer.items()}
    shapes["model.norm.weight"] = (hidden,)
    return shapes if config.tie_word_embeddings else shapes | {TIED: (config.vocab_size, hidden)}


def check_stored(directory: Path) -> tuple[Qwen3Config, int]:
    """Return the config and the number of parameters of a checkpoint whose files have all of them, in their shapes.

    Of their values only those of a head beside a tied embedding are read. Raises `CheckpointError` as reading all of
    them would.
    """
    config = read_config(directory)
    stored = stored_tensors(directory)
    check_values(directory, stored, tied=config.tie_word_embeddings)
    check_depth(directory, config.num_hidden_layers, stored)
    found = {name: tensor.shape for name, tensor in stored.items()}
    if config.tie_word_embeddings:
        found.pop(TIED, None)
    expected = parameter_shapes(config)
    check_shapes(directory, found, expected)
    return config, sum(prod(shape) for shape in expected.values())


def check_values(directory: Path, stored: Mapping[str, StoredTensor], *, tied: bool) -> None:
    """Raises `CheckpointError` for weights that are no values by themselves, and for a head that is not the embedding
    which the config says that it is."""
    for name, tensor in stored.items():
        if tensor.type not in PLAIN_TYPES:
            raise CheckpointError(
                f"{directory}: {name}: expected one of {', '.join(PLAIN_TYPES)}, found {tensor.type}: quantised "
                "weights cannot be trained; name the checkpoint that they were made of"
            )
    head, embedding = stored.get(TIED), stored.get(EMBEDDING)
    if tied and head is not None and embedding is not None and not _same_values(head, embedding):
        raise CheckpointError(
            f"{directory}: {TIED}: is another tensor than {EMBEDDING}, and {CONFIG_FILE} says that they are tied "
            "(tie_word_embeddings): set that to false to keep both, or remove the tensor to have them tied"
        )


def check_depth(directory: Path, layers: Any, stored: Mapping[str, StoredTensor]) -> None:
    """Raises `CheckpointError` for more layers than there are tensors, of which a model would take all of the machine's
    memory."""
    if isinstance(layers, int) and layers > len(stored):
        raise CheckpointError(
            f"{directory / CONFIG_FILE}: num_hidden_layers: found {layers}, but the files have {len(stored)} "
            "tensors; allowed: as many as they have layers"
        )


def check_ends(directory: Path, raw: Mapping[str, Any]) -> None:
    """Raises `CheckpointError` for end tokens, of a model's config or its generation config, that are no tokens."""
    more = directory / GENERATION_CONFIG_FILE
    parts = {directory / CONFIG_FILE: raw, more: read_object(more) if more.exists() else {}}
    for path, part in parts.items():
        ends = part.get("eos_token_id")
        if not all(isinstance(one, int) for one in (ends if isinstance(ends, list) else [ends]) if one is not None):
            raise CheckpointError(f"{path}: eos_token_id: found {ends!r}; allowed: a number, or a list of numbers")


def check_not_quantised(path: Path, raw: Mapping[str, Any]) -> None:
    """Raises `CheckpointError` where a config, from `path`, says that its weights are quantised."""
    text = raw.get("text_config")
    for part in (raw, text if isinstance(text, dict) else {}):
        for key in QUANTISATIONS:
            if (quantised := part.get(key)) is not None:
                how = quantised.get("quant_method") if isinstance(quantised, dict) else None
                raise CheckpointError(
                    f"{path}: found a {key}{f' ({how})' if how else ''}: quantised weights cannot be trained; name the "
                    "checkpoint that they were made of"
                )


def stored_tensors(directory: Path) -> dict[str, StoredTensor]:
    """Return what the headers of a checkpoint's files say. Raises `CheckpointError`."""
    found: dict[str, StoredTensor] = {}
    for path in weight_files(directory):
        for name, tensor in _headers(path):
            if name in found:
                raise CheckpointError(f"{path}: {name}: is in {found[name].path.name}, too; allowed: once")
            found[name] = tensor
    return found


def file_headers(path: Path) -> dict[str, StoredTensor]:
    """Return what the header of one file says. Raises `CheckpointError`."""
    return dict(_headers(path))


def float32_names(stored: Mapping[str, StoredTensor]) -> frozenset[str]:
    """The tensors that a policy's versions have in float32, as its files do; all others are rounded to bfloat16."""
    return frozenset(name for name, tensor in stored.items() if tensor.type == "F32")


def count_float32(stored: Mapping[str, StoredTensor]) -> int:
    """The elements of the tensors that travel in float32."""
    return sum(prod(stored[name].shape) for name in float32_names(stored))


def _same_values(one: StoredTensor, other: StoredTensor) -> bool:
    if (one.type, one.shape, one.end - one.begin) != (other.type, other.shape, other.end - other.begin):
        return False
    try:
        with one.path.open("rb") as first, other.path.open("rb") as second:
            for at in range(0, one.end - one.begin, COMPARED_BYTES):
                count = min(COMPARED_BYTES, one.end - one.begin - at)
                first.seek(one.begin + at)
                second.seek(other.begin + at)
                if first.read(count) != second.read(count):
                    return False
    except OSError as error:
        raise CheckpointError(f"{one.path}: cannot be read ({error})") from error
    return True


def check_shapes(
    directory: Path, found: Mapping[str, tuple[int, ...]], expected: Mapping[str, tuple[int, ...]]
) -> None:
    """Raises `CheckpointError` naming the first tensor that is missing, unexpected or of another shape."""
    if (why := misfit(found, expected)) is not None:
        raise CheckpointError(f"{directory}: does not fit the model: {why}")


def misfit(found: Mapping[str, Sequence[int]], expected: Mapping[str, Sequence[int]]) -> str | None:
    """The first tensor by whose absence, presence or shape one model's tensors are not those of another; or None."""
    for name, shape in expected.items():
        if name not in found:
            return f"{name}: missing; expected shape {list(shape)}{_layers_differ(name, found, expected)}"
        if tuple(found[name]) != tuple(shape):
            return f"{name}: expected shape {list(shape)}, found {list(found[name])}"
    unexpected = min(found.keys() - expected.keys(), default=None)
    if unexpected is None:
        return None
    differ = _layers_differ(unexpected, found, expected)
    return f"{unexpected}: not a parameter of this model (found shape {list(found[unexpected])}){differ}"


def _layers_differ(name: str, found: Iterable[str], expected: Iterable[str]) -> str:
    """How many layers there are and how many there should be, where that is why this tensor is odd."""
    place = _LAYER.search(name)
    if place is None:
        return ""
    before = name[: place.start(1)]

    def layers(names: Iterable[str]) -> int:
        of_layers = (_LAYER.match(one, max(0, len(before) - 1)) for one in names if one.startswith(before))
        return max((int(number[1]) + 1 for number in of_layers if number is not None), default=0)

    there, wanted = layers(found), layers(expected)
    return "" if there == wanted else f"; found {there} layers; allowed: {wanted}, as its config says"


def weight_files(directory: Path) -> list[Path]:
    """The files with a checkpoint's tensors. Raises `CheckpointError`."""
    single, index = directory / WEIGHTS_FILE, directory / INDEX_FILE
    check_links(single, index)
    if single.exists():
        return [single]
    if not index.exists():
        raise CheckpointError(f"{directory}: found neither {WEIGHTS_FILE} nor {INDEX_FILE}")
    weight_map = read_object(index).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
        raise CheckpointError(f"{index}: weight_map must map tensor names to file names")
    names = sorted(set(weight_map.values()))
    if (odd := next((name for name in names if not _is_beside(name)), None)) is not None:
        raise CheckpointError(f"{index}: weight_map: found {odd[:100]!r}; allowed: names of files beside it")
    files = [directory / name for name in names]
    check_links(*files)
    if (missing := next((file for file in files if not file.exists()), None)) is not None:
        raise CheckpointError(f"{missing}: is not there, and {INDEX_FILE} names it")
    return files


def _is_beside(name: str) -> bool:
    """Whether it names a file of a directory, and nothing outside of it."""
    try:
        size_bytes = len(name.encode())
    except UnicodeEncodeError:  # Half of a character, which JSON can say.
        return False
    return name not in ("", ".", "..") and not {"/", "\0"}.intersection(name) and size_bytes <= NAME_BYTES


def check_links(*paths: Path) -> None:
    """Raises `CheckpointError` for a link that leads nowhere, as in a cache of the Hub that has lost files."""
    for link in paths:
        if link.is_symlink() and not link.exists():
            raise CheckpointError(f"{link}: a link to {link.readlink()}, which is not there; `hf download` fetches it")


def check_words(directory: Path) -> None:
    """Raises `CheckpointError` where a file that stands beside the weights is a link that leads nowhere: a policy would
    go on without its tokenizer, its template or the tokens that end its turns."""
    check_links(*sorted(path for path in directory.glob("*") if path.suffix in BESIDE_WEIGHTS))


def _headers(path: Path) -> Iterator[tuple[str, StoredTensor]]:
    if not path.is_file():
        raise CheckpointError(f"{path}: is not a file")
    try:
        with safe_open(path, framework="np"):  # which checks the header against the file
            pass
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(_LENGTH_BYTES))
            header: dict[str, Any] = json.loads(file.read(length))
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{path}: cannot be read ({error})") from error
    for name, about in header.items():
        if name != "__metadata__":
            begin, end = (_LENGTH_BYTES + length + offset for offset in about["data_offsets"])
            yield name, StoredTensor(path, about["dtype"], tuple(about["shape"]), begin, end)


def read_object(path: Path) -> dict[str, Any]:
    """A JSON file of one object. Raises `CheckpointError`."""
    try:
        value = read_json(path)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror})") from error
    except ValueError as error:
        raise CheckpointError(f"{path}: not valid JSON ({error})") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: expected a JSON object (found {type(value).__name__})")
    return value
