"""The language model: embeddings, blocks of a mixer and an MLP, a head.

Shapes: B batch, T new positions, D hidden size, V vocabulary.
"""

import math
import os
from functools import partial
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedModel
from transformers import initialization as init
from transformers.cache_utils import Cache
from transformers.loss.loss_utils import ForCausalLMLoss
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.modeling_utils import slice_logits_to_keep
from transformers.utils.generic import can_return_tuple, merge_with_config_defaults
from transformers.utils.output_capturing import capture_outputs

from hypermlp.errors import UserError
from hypermlp.layers.base import SequenceMixer
from hypermlp.layers.canon import Canon
from hypermlp.layers.initialization import initialize_
from hypermlp.layers.mlp import GeluMlp, SwigluMlp
from hypermlp.layers.plain import is_plain
from hypermlp.layers.registry import layer_of
from hypermlp.layers.resizing import DEFAULT_METHOD
from hypermlp.layers.visibility import Visibility, visibility_after
from hypermlp.models.arguments import CAUSAL_ARGUMENTS, MODEL_ARGUMENTS, check_arguments, check_context, embed
from hypermlp.models.cache import layer_state
from hypermlp.models.configuration_hypermlp import HyperMLPConfig
from hypermlp.models.extension import extend_context_
from hypermlp.models.generation import Generation
from hypermlp.models.loss import check_labels, head_loss
from hypermlp.models.padded_prompts import PaddedGenerationMixin
from hypermlp.models.visibility import Packed, batch_starts


def _norm(config: HyperMLPConfig) -> nn.Module:
    assert config.norm_eps is not None
    if config.block == "gpt2":
        return nn.LayerNorm(config.hidden_size, eps=config.norm_eps, bias=False)
    return nn.RMSNorm(config.hidden_size, eps=config.norm_eps)


class HyperMLPBlock(GradientCheckpointingLayer):
    """One block: ``x = x + mixer(norm(x))``, then ``x = x + mlp(norm(x))``.

    ``config.canon`` adds Canon layers to the inputs of the mixer and the MLP, and inside both.
    """

    def __init__(self, config: HyperMLPConfig, index: int):
        super().__init__()
        self.index = index
        self.mixer_norm = _norm(config)
        self.mixer = layer_of(config.mixer_config(index))
        self.mlp_norm = _norm(config)
        assert config.intermediate_size is not None
        self.mlp = (GeluMlp if config.block == "gpt2" else SwigluMlp)(
            config.hidden_size, config.intermediate_size
        )
        places = {place: Canon(width) for place, width in config.canon_widths.items()}
        self.canon = nn.ModuleDict(places) if places else None
        if config.block == "gpt2":
            for output in (self.mixer.o_proj, self.mlp.down_proj):
                # Its initial weights are smaller, the more blocks add to the residual stream.
                output.is_residual_output = True  # type: ignore[assignment]

    def forward(self, x: Tensor, visibility: Visibility, past_key_values: Cache | None = None) -> Tensor:
        state: Any = layer_state(past_key_values, self.index, self, x.shape[0])

        places: Any = self.canon or {}

        def canon(place: str, y: Tensor) -> Tensor:
            if place not in places:
                return y
            return places[place](y, visibility, state, f"canon {place}", backend=self.mixer.backend)

        x = x + self.mixer(canon("A", self.mixer_norm(x)), state=state, visibility=visibility)
        change = partial(canon, "D") if "D" in places else None
        out: Tensor = x + self.mlp(canon("C", self.mlp_norm(x)), change)
        return out

    def new_state(self, batch_size: int, **settings: Any) -> Any:
        """Return the decoding state of the block; ``settings`` are those of ``SequenceMixer.new_state``.

        The mixer and the Canon layers share it, and the model takes in what they offer during a call.
        """
        if self.canon is not None and settings.get("capacity") is not None:
            raise UserError("a model with canon has no static cache; use the default cache")
        state = self.mixer.new_state(batch_size, **settings)
        state.in_model = True
        return state


class HyperMLPPreTrainedModel(PreTrainedModel):
    config: HyperMLPConfig
    config_class = HyperMLPConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ["HyperMLPBlock"]
    _skip_keys_device_placement = ["past_key_values"]
    _can_record_outputs = {"hidden_states": HyperMLPBlock}

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        depth = 2 * self.config.num_hidden_layers if getattr(module, "is_residual_output", False) else 1
        initialize_(module, self.config.initializer_range / math.sqrt(depth), init)

    def extend_context(self, n: int, method: str = DEFAULT_METHOD, rope_type: str | None = None) -> Self:
        """Give the model a context of ``n`` positions, in place, and return it.

        Up to the shorter of both contexts, the model computes what it did, unless ``rope_type`` is given.
        Decoding states (caches) and states of optimizers from before the change are refused afterwards.

        Args:
            n: the new context, at least every ``sliding_window``; a shorter one drops the last slots.
            method: the parameters of added slots, and of added learned positions: "repeat", the default,
                takes the far half again and again (of L old slots, the i-th new one takes slot h + i mod
                (L - h), with h = L // 2), "log-lag" stretches it, "mean" averages the last 32, "zero" is 0.
            rope_type: "ntk" or "yarn" also scales the rotary frequencies of labels with the letter p.

        Raises:
            UserError: for a value that is not allowed; the model is then unchanged.

        Example::

            from hypermlp.models import HyperMLPConfig, HyperMLPForCausalLM

            sizes = dict(hidden_size=64, num_hidden_layers=2, max_position_embeddings=128, vocab_size=257)
            model = HyperMLPForCausalLM(HyperMLPConfig(**sizes)).extend_context(512)
            assert model.config.max_position_embeddings == 512
        """
        extend_context_(self, n, method, rope_type)
        return self

    def save_pretrained(self, save_directory: str | os.PathLike[Any], *args: Any, **kwargs: Any) -> Any:
        """Save as transformers does, and let ``trust_remote_code=True`` find this package.

        The folder also gets a file modeling_hypermlp.py that imports the model from hypermlp, and its
        configuration names that file (``auto_map``). ``AutoModelForCausalLM.from_pretrained(folder,
        trust_remote_code=True)`` then works without importing hypermlp first; the package must be installed.
        """
        self.config.auto_map = {
            f"Auto{kind}": f"modeling_hypermlp.HyperMLP{name}"
            for kind, name in (("Config", "Config"), ("Model", "Model"), ("ModelForCausalLM", "ForCausalLM"))
        }
        if kwargs.get("is_main_process", True):
            Path(save_directory).mkdir(parents=True, exist_ok=True)
            lines = Path(__file__).with_name("remote_code.py.txt").read_text()
            (Path(save_directory) / "modeling_hypermlp.py").write_text(lines)
        return super().save_pretrained(save_directory, *args, **kwargs)


class HyperMLPModel(HyperMLPPreTrainedModel):
    """The language model without its head: token ids ``[B, T]`` to hidden states ``[B, T, D]``.

    Args:
        config: a ``HyperMLPConfig``.

    Example::

        import torch
        from hypermlp.models import HyperMLPConfig, HyperMLPModel

        sizes = dict(hidden_size=64, num_hidden_layers=2, max_position_embeddings=128, vocab_size=257)
        model = HyperMLPModel(HyperMLPConfig(**sizes))
        hidden = model(torch.randint(0, 257, (2, 32))).last_hidden_state  # [2, 32, 64]
    """

    def __init__(self, config: HyperMLPConfig):
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.embed_positions = (
            nn.Embedding(config.max_position_embeddings, config.hidden_size)
            if config.learned_positions
            else None
        )
        self.layers = nn.ModuleList(HyperMLPBlock(config, index) for index in range(config.num_hidden_layers))
        self.norm = _norm(config)
        self.gradient_checkpointing = False
        self.post_init()

    @merge_with_config_defaults
    @capture_outputs
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        document_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        **kwargs: Any,
    ) -> BaseModelOutputWithPast:
        """Compute the hidden states of T new positions, after the P positions that the cache holds.

        Args:
            input_ids: ``[B, T]``; or inputs_embeds instead.
            attention_mask: ``[B, P + T]``: 1 for tokens, 0 for padding on the left or on the right. After
                padding on the right, no token can follow from the cache.
            position_ids: ``[B or 1, T]``. If there is no mask, no filled cache and no document_ids, a
                document begins wherever they do not increase by 1. Their values matter for
                ``learned_positions`` only; RoPE and the mixes count from the beginning of the document.
            document_ids: integers ``[B, T]``: a packed document begins wherever the number changes, and sees
                no other; not with a filled cache.
            past_key_values: a cache that ``DynamicCache(config=model.config)`` or ``use_cache=True`` made; it
                is updated in place.
            inputs_embeds: ``[B, T, D]`` in the place of input_ids.
            use_cache: whether to return a cache. None: ``config.use_cache``.
            kwargs: ``cu_seqlens``, integers ``[N + 1]``: cumulative lengths of N documents packed into one
                row (B = 1), instead of document_ids. Transformers' names ``cu_seq_lens_q``,
                ``cu_seq_lens_k``, ``max_length_q``, ``max_length_k`` and ``seq_idx`` are accepted too, and
                its ``output_hidden_states`` and ``return_dict``. Any other name raises.

        Returns:
            ``last_hidden_state`` ``[B, T, D]`` after the final norm, ``past_key_values`` (None without a
            cache) and, if asked for, ``hidden_states``.

        Raises:
            UserError: for an unknown argument, wrong shapes, zeros between ones in the mask, or more than
                max_position_embeddings positions.
        """
        check_arguments(kwargs, MODEL_ARGUMENTS)
        if (input_ids is None) == (inputs_embeds is None):
            raise UserError("exactly one of input_ids and inputs_embeds must be given")
        x = embed(self.embed_tokens, input_ids) if inputs_embeds is None else inputs_embeds
        if use_cache and past_key_values is None:
            past_key_values = DynamicCache(config=self.config)
        packed = Packed(**{name: kwargs[name] for name in Packed._fields if name in kwargs})
        visibility = self._visibility(x, attention_mask, position_ids, document_ids, packed, past_key_values)
        if self.embed_positions is not None:
            if position_ids is None:
                reach = visibility.reach
                position_ids = visibility.stream()[None] if reach is None else (reach - 1).clamp(min=0)
            x = x + self.embed_positions(position_ids)
        for block in self.layers:
            x = block(x, visibility, past_key_values=past_key_values)
        x = self.norm(x)
        for block in self.layers:  # all of them or none: nothing fails from here on
            state = layer_state(past_key_values, block.index, block, x.shape[0])  # type: ignore[arg-type]
            if state is not None:
                state.take_in(visibility)
        return BaseModelOutputWithPast(last_hidden_state=x, past_key_values=past_key_values)

    def mixers(self) -> list[SequenceMixer]:
        """Return the mixer modules of all layers, first to last; ``config.mixers`` has their names."""
        return [block.mixer for block in self.layers]  # type: ignore[misc]

    def _visibility(
        self,
        x: Tensor,
        attention_mask: Tensor | None,
        position_ids: Tensor | None,
        document_ids: Tensor | None,
        packed: Packed,
        cache: Cache | None,
    ) -> Visibility:
        """Compute once, for all layers, which positions each new position sees."""
        batch, new = x.shape[:2]
        mixers = self.mixers()
        # A layer without a window, if there is one: it limits the length of the stream.
        blocks: Any = self.layers
        block = next((block for block in blocks if block.mixer.window is None), blocks[0])
        state = layer_state(cache, block.index, block, batch)
        past = 0 if state is None else state.past
        starts = batch_starts(
            attention_mask,
            position_ids,
            document_ids,
            packed.starts(x, past=past),
            batch=batch,
            new=new,
            past=past,
        )
        longest = [mixer.max_visible for mixer in mixers if mixer.max_visible is not None]
        context = min(longest, default=None)
        if any(mixer.window is None for mixer in mixers):
            check_context(context, starts, state, new=new)
        return visibility_after(state, starts, new=new, device=x.device, max_visible=context)


class HyperMLPForCausalLM(HyperMLPPreTrainedModel, Generation, PaddedGenerationMixin):  # type: ignore[misc]
    """A causal language model around any sequence mixer, as a ``PreTrainedModel`` of transformers.

    ``logits = norm(blocks(embed(input_ids))) Eᵀ``, where E is the embedding matrix, or a matrix of its own if
    ``tie_word_embeddings`` is False. ``HyperMLPConfig`` documents the blocks. ``generate`` (greedy, sampling,
    beams, assisted), ``from_pretrained`` and ``save_pretrained``, ``pipeline("text-generation")``, the
    Trainer, gradient checkpointing and PEFT adapters work as for other models.

    Args:
        config: a ``HyperMLPConfig``.

    Example::

        import torch
        from hypermlp.models import HyperMLPConfig, HyperMLPForCausalLM

        sizes = dict(hidden_size=64, num_hidden_layers=2, max_position_embeddings=128, vocab_size=257)
        model = HyperMLPForCausalLM(HyperMLPConfig(**sizes))
        tokens = torch.randint(0, 257, (2, 32))
        loss = model(tokens, labels=tokens).loss
        more = model.generate(tokens, max_new_tokens=8, do_sample=False)  # [2, 40]
    """

    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}
    _fsdp_plan = {"lm_head": "keep_full_weight"}

    def __init__(self, config: HyperMLPConfig):
        super().__init__(config)
        self.model = HyperMLPModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        # A recurrence cannot take back tokens: this makes transformers refuse assisted generation.
        self._is_stateful = any(mixer.recurrent for mixer in self.model.mixers())
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        document_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        skip_logits: bool = False,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast:
        """Compute logits and, with ``labels``, the loss; ``HyperMLPModel.forward`` explains other arguments.

        Args:
            labels: ``[B, T]``, aligned with input_ids (usually input_ids itself) and shifted inside: position
                t is scored on ``labels[:, t + 1]``, also where a packed document begins at t + 1. Labels of
                -100 are not scored; set them for padding, which attention_mask does not exclude.
            logits_to_keep: compute the logits of this many last positions, or of the positions with these
                indices; 0, the default, for all. With labels, leave it at 0.
            skip_logits: with labels, compute the loss in chunks and return no logits, which saves memory
                (False). It is ignored without labels, inside torch.compile, with another ``loss_function``,
                and if the head is an adapter, sharded, quantised or has hooks.

        Returns:
            ``loss`` (cross entropy in nats, None without labels: the mean over scored labels or, if
            transformers passes ``num_items_in_batch``, the sum divided by it), ``logits`` ``[B, T or fewer,
            vocab_size]`` (None if skipped), ``past_key_values`` and ``hidden_states`` (None unless asked
            for).
        """
        check_arguments(kwargs, CAUSAL_ARGUMENTS)
        check_labels(labels, input_ids, self.config.vocab_size)
        outputs = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            document_ids=document_ids,
            past_key_values=past_key_values,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            **kwargs,
        )
        hidden = outputs.last_hidden_state
        logits: Any = None
        loss: Any = None
        if labels is not None and skip_logits and self._can_skip_logits():
            numbers = {name: kwargs.get(name) for name in ("shift_labels", "num_items_in_batch")}
            loss = head_loss(hidden, self.lm_head.weight, labels, **numbers)
        else:
            logits = self.lm_head(slice_logits_to_keep(hidden, logits_to_keep))
            if labels is not None:
                vocabulary = self.config.vocab_size
                loss = self.loss_function(logits=logits, labels=labels, vocab_size=vocabulary, **kwargs)
        return CausalLMOutputWithPast(
            loss=loss,
            logits=logits,
            past_key_values=outputs.past_key_values,
            hidden_states=outputs.hidden_states,
        )

    def _can_skip_logits(self) -> bool:
        """Return True if the loss may be computed from the head's weight alone.

        It may not where the head is an adapter, sharded, quantised or hooked, where another loss was chosen,
        and inside torch.compile, which plans memory itself.
        """
        return (
            is_plain(self.lm_head, nn.Linear)
            and self.loss_function is ForCausalLMLoss
            and not torch.compiler.is_compiling()
        )
