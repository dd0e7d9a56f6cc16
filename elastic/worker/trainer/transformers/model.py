"""A causal language model of transformers as the trainer uses it: log-probabilities of rows, and tensors as on disk.

What can be read off a model is checked on it as it is loaded, with its own attention and its own logits beside it: its
head is the linear layer that it seems to be, and sequences that share a row have the log-probabilities that they have
alone. Where the first does not hold its own logits are used, and where the second does not it is trained unpacked.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal, Protocol, TypeAlias

import structlog
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM
from transformers.core_model_loading import revert_weight_conversion
from transformers.utils.logging import disable_progress_bar

from elastic.engine.model.stored import CheckpointError, StoredTensor, check_shapes, float32_names, stored_tensors
from elastic.worker.trainer.distribution import Head, TokenDistribution, logits_distribution, token_distribution
from elastic.worker.trainer.packing import PackedRow
from elastic.worker.trainer.transformers import attention

log = structlog.get_logger(__name__)

Attention: TypeAlias = Literal["auto", "sdpa", "eager", "flash_attention_2"]

PROBE_LENGTHS = (5, 11, 3)
"""The lengths of the sequences on which a model is checked."""
PROBE_TOLERANCE = 1e-4
"""In nats, on average, in float32: ten times what other shapes of the same sums come to. A look at a neighbour's tokens
is a thousand times that."""
OF_MASKS_ALONE = ("chunked_attention",)
"""Kinds of layers whose reach stands in their masks alone."""


class Reference(Protocol):
    """A frozen policy that another one is compared with."""

    def named_parameters(self) -> Mapping[str, Tensor]:
        """Those that are its own."""
        ...

    def distribution(self, row: PackedRow, temperature: float | Tensor) -> TokenDistribution: ...


class CausalModel:
    """Holds the model. Its parameters are float32, until `compute_in` says otherwise."""

    def __init__(
        self, directory: Path, device: torch.device, wanted: Attention, activation_checkpointing: bool
    ) -> None:
        """Load the checkpoint in `directory`. Raises `CheckpointError` for one that does not fit its own config, and
        `ValueError` for an attention that this model does not have."""
        self.directory = directory
        self._stored = stored_tensors(directory)
        self.model = _loaded(directory, self._stored, device, wanted)
        self.text_config: Any = self.model.config.get_text_config()
        self.vocab_size: int = self.text_config.vocab_size
        self.device = device
        self._names = names_on_disk(directory, self.model, self._stored)
        self.float32 = float32_names(self._stored)
        """Tensors, by their names in the files, that are float32 there."""
        with torch.no_grad():
            own = self._alone(plain_head=False)
            self._check_looks(own)
            self._plain_head = self._agrees(lambda: self._alone(plain_head=True), own)
            self.packs = self._packed(own, wanted)
            trains = self._trains_as_it_is(own)
        if not self._plain_head:
            log.warning("the model's logits are more than its last layer's: all of a row's are computed at once")
        if not self.packs:
            log.warning("sequences that share a row of this model see each other: each has a row of its own")
        if not trains:
            log.warning("as it trains the model leaves things to chance: it is asked as it generates instead")
        if activation_checkpointing and trains:
            # Up to 5.19, which vLLM 0.32 asks for, transformers has it by another name.
            named = "activation" if hasattr(self.model, "activation_checkpointing_enable") else "gradient"
            getattr(self.model, f"{named}_checkpointing_enable")({"use_reentrant": False})

    @property
    def sharded(self) -> bool:
        """Whether parameters here are shards of the model's, on this rank of several."""
        return False

    def named_parameters(self) -> dict[str, Tensor]:
        """What is trained here, tied parameters once, in the order of the model."""
        return dict(self.model.named_parameters())

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Those of the whole parameters."""
        return {name: tuple(parameter.shape) for name, parameter in self.named_parameters().items()}

    def gradients(self, loss: Tensor) -> list[Tensor | None]:
        """The loss's, one a parameter; None for what has no part in it."""
        return list(torch.autograd.grad(loss, list(self.named_parameters().values()), allow_unused=True))

    def compute_in(self, dtype: torch.dtype) -> None:
        """Keep parameters in this type, except those that the model says it needs in float32."""
        kept = {*(self.model._keep_in_fp32_modules or ()), *(self.model._keep_in_fp32_modules_strict or ())}
        for name, parameter in self.model.named_parameters():
            if not kept.intersection(name.split(".")):
                parameter.data = parameter.data.to(dtype)

    def distribution(self, row: PackedRow, temperature: float | Tensor) -> TokenDistribution:
        """What the row's trained tokens were sampled from, as the model has it now."""
        return self.local_distribution(row, temperature)

    def local_distribution(self, row: PackedRow, temperature: float | Tensor) -> TokenDistribution:
        """As `distribution`, by this process's modules."""
        return self._distribution(row, temperature, self._plain_head)

    def _distribution(self, row: PackedRow, temperature: float | Tensor, plain_head: bool) -> TokenDistribution:
        ids, predicting, trained = (
            tensor.to(self.device) for tensor in (row.token_ids, row.predicting, row.trained_ids)
        )
        given = self._packing(row) if len(row.sequences) > 1 else {}
        if not plain_head:
            logits = self.model(input_ids=ids[None], use_cache=False, **given).logits[0]
            return logits_distribution(logits[predicting], trained, temperature)
        states = self.model.base_model(input_ids=ids[None], use_cache=False, **given).last_hidden_state[0]
        return token_distribution(states[predicting], self._head(), trained, temperature)

    def as_stored(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Tensors by their names here under the names and in the shapes of the files. Some of a model's do, if they are
        all of a layer's."""
        if not self._names:
            return _unfused(self.model, tensors)
        return {name: tensors[name] for name in self._names if name in tensors}

    def published_buffers(self) -> dict[str, Tensor]:
        """What stays as it is and is in the files, too."""
        return dict(_buffers(self.model))

    def merged(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """What is trained, `tensors`, as a whole policy, under the names and in the shapes of the files."""
        return CausalModel.as_stored(
            self, {name: buffer.clone() for name, buffer in _buffers(self.model)} | dict(tensors)
        )

    def proof(self) -> list[float]:
        """What those who serve this version are to answer (`elastic.engine.base.proof_text`); whole models need none,
        since their tensors are verified."""
        return []

    def _head(self) -> Head:
        layer, config = self.model.get_output_embeddings(), self.text_config
        scale = float(getattr(config, "logit_scale", None) or 1.0) / (getattr(config, "logits_scaling", None) or 1.0)
        return Head(layer.weight, layer.bias, getattr(config, "final_logit_softcapping", None) or 0.0, scale)

    def _packing(self, row: PackedRow) -> dict[str, Any]:
        """How a row's sequences lie, in all the ways in which models ask for it."""
        ends = torch.tensor([0, *accumulate(row.sequences)], dtype=torch.int32, device=self.device)
        numbers = torch.repeat_interleave(torch.arange(len(row.sequences)), torch.tensor(row.sequences))
        return {
            "position_ids": row.positions[None].to(self.device),
            "sequences": row.sequences,
            "cu_seq_lens_q": ends,
            "cu_seq_lens_k": ends,
            "max_length_q": max(row.sequences),
            "max_length_k": max(row.sequences),
            "seq_idx": numbers[None].to(self.device, torch.int32),
        }

    def _packed(self, own: Tensor, wanted: Attention) -> bool:
        """Have the model compute attention by sequence, if that is the same; returns whether rows may be shared."""
        before = self.model.config._attn_implementation
        types = getattr(self.text_config, "layer_types", None) or ()
        if wanted != "flash_attention_2":
            if not self.model._supports_attention_backend or any(kind in OF_MASKS_ALONE for kind in types):
                return False
            attention.register()
            self.model.set_attn_implementation(attention.SDPA if before == "sdpa" else attention.EAGER)
        if all(self._agrees(looks, own) for looks in (self._together, lambda: self._alone(self._plain_head))):
            return True
        self.model.set_attn_implementation(before)
        return False

    def _trains_as_it_is(self, own: Tensor) -> bool:
        """Have the model train, which activation checkpointing needs, with all that it would drop kept; returns whether
        it says the same then. Where it does not (routers with noise) it is left as it generates."""
        _keep_all(self.model.train())
        if self._agrees(lambda: self._alone(self._plain_head), own):
            return True
        self.model.eval()
        return False

    def _agrees(self, other: Callable[[], Tensor], own: Tensor) -> bool:
        try:
            found = other()
        except (TypeError, ValueError, KeyError, AttributeError, RuntimeError) as error:
            log.debug("the model does not take this", error=repr(error))
            return False
        return bool((found - own).abs().mean() <= PROBE_TOLERANCE)

    def _check_looks(self, own: Tensor) -> None:
        """Raises `CheckpointError` for a model that says nothing, or whose tokens see those behind them."""
        if not own.isfinite().all():
            what = f"{int((~own.isfinite()).sum())} of the log-probabilities of {len(own)} tokens are no numbers"
            raise CheckpointError(f"{self.directory}: {what}: its weights or numbers of its config are damaged")
        others = self._alone(plain_head=False, last_token=1)
        last = torch.tensor([length - 1 for length in PROBE_LENGTHS]).cumsum(0) - 1
        before = torch.ones_like(own, dtype=torch.bool).index_fill(0, last.to(own.device), value=False)
        if (others - own)[before].abs().mean() > PROBE_TOLERANCE:
            raise CheckpointError(f"{self.directory}: its tokens see those behind them; allowed: a decoder-only model")

    def _probes(self) -> list[Tensor]:
        generator = torch.Generator().manual_seed(0)
        return [torch.randint(self.vocab_size, (length,), generator=generator) for length in PROBE_LENGTHS]

    def _alone(self, plain_head: bool, last_token: int = 0) -> Tensor:
        """Log-probabilities of the probes' tokens, each probe in a row of its own; its last token is another one, so
        many further on."""
        rows: list[Tensor] = []
        for probe in self._probes():
            probe[-1] = (probe[-1] + last_token) % self.vocab_size
            rows.append(self._distribution(row_of_sequences([probe]), 1.0, plain_head).logprobs)
        return torch.cat(rows)

    def _together(self) -> Tensor:
        return self.local_distribution(row_of_sequences(self._probes()), 1.0).logprobs


def _keep_all(model: nn.Module) -> None:
    """Set to zero the shares that modules drop, by modules of their own or by numbers that they have read off the
    config."""
    for module in model.modules():
        for name, value in list(vars(module).items()):
            if isinstance(value, float) and (isinstance(module, nn.Dropout) or "drop" in name):
                setattr(module, name, 0.0)


def names_on_disk(directory: Path, model: Any, stored: Mapping[str, StoredTensor]) -> list[str]:
    """The names of the model's tensors, if they are those of the files as they stand; none where they are fused here.

    Raises `CheckpointError` where the files lack some of the model's tensors, or have other shapes, or tensors that are
    none of the model's and that transformers does not know to leave out.
    """
    here = {name: tensor.detach().to("meta") for name, tensor in (*_buffers(model), *model.named_parameters())}
    tied = {name: tensor.detach().to("meta") for name, tensor in model.state_dict().items()}
    fused = not all(name in stored and stored[name].shape == tuple(tensor.shape) for name, tensor in here.items())
    expected, known = (_unfused(model, here), _unfused(model, tied)) if fused else (here, tied)
    strange = {name for name in stored if name not in expected and name not in known}
    shapes = {name: tuple(tensor.shape) for name, tensor in expected.items()}
    found = {name: stored[name].shape for name in (*shapes, *_not_left_out(model, strange)) if name in stored}
    check_shapes(directory, found, shapes)
    return [] if fused else list(here)


def _not_left_out(model: Any, names: set[str]) -> set[str]:
    """Return those of the tensors which the model lacks that it does not list as ones to be left out as it is
    loaded."""
    about = SimpleNamespace(missing_keys=set[str](), unexpected_keys=names)
    model._adjust_missing_and_unexpected_keys(about)
    return about.unexpected_keys


def _buffers(model: Any) -> Iterator[tuple[str, Tensor]]:
    persistent = model.state_dict().keys()
    for name, buffer in model.named_buffers():
        if name in persistent:
            yield name, buffer


def row_of_sequences(sequences: Sequence[Tensor]) -> PackedRow:
    """All tokens but each sequence's first are trained."""
    lengths = tuple(len(sequence) for sequence in sequences)
    positions = [torch.arange(length) for length in lengths]
    begins = [0, *accumulate(lengths)]
    predicting = [place[:-1] + begin for place, begin in zip(positions, begins, strict=False)]
    trained = torch.cat([sequence[1:] for sequence in sequences])
    return PackedRow(torch.cat(list(sequences)), torch.cat(positions), lengths, torch.cat(predicting), trained)


def _loaded(directory: Path, stored: Mapping[str, StoredTensor], device: torch.device, wanted: Attention) -> Any:
    """The model in float32, with attention of its own."""
    disable_progress_bar()
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            directory,
            dtype=torch.float32,
            attn_implementation=None if wanted == "auto" else wanted,
            local_files_only=True,
            trust_remote_code=False,
            output_loading_info=True,
        )
    except (ImportError, OSError, RuntimeError, ValueError, KeyError) as error:
        if wanted != "auto" and isinstance(error, ImportError | ValueError):
            raise ValueError(no_attention(wanted, error)) from error
        raise CheckpointError(f"{directory}: transformers cannot load it: {error}") from error
    model, about = loaded
    for what, words in (
        ("missing_keys", "missing"),
        ("mismatched_keys", "of another shape"),
        ("unexpected_keys", "not a parameter of this model"),
    ):
        if names := about.get(what):
            raise CheckpointError(f"{directory}: does not fit the model: {min(map(str, names))}: {words}")
    return model.to(device)


def no_attention(wanted: Attention, error: Exception) -> str:
    """What to say where transformers does not make the model with this attention."""
    words = f"found {wanted!r}, which this model does not have here; allowed: 'auto'"
    return f"trainer.transformers.attention: {words} ({str(error).splitlines()[0]})"


def _unfused(model: Any, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """What transformers fuses as it loads (such as stacked experts) taken apart again."""
    return {name: tensor.contiguous() for name, tensor in revert_weight_conversion(model, dict(tensors)).items()}
