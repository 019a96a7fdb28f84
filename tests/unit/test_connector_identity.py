"""What makes two loaded models one model to the cache, and what doesn't."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as t
from tiny_models import llama
from torch.nn.modules.module import register_module_forward_hook

from lmcache_core.connectors.transformers.adapters import Adapters
from lmcache_core.connectors.transformers.forward import Forward, unwrapped
from lmcache_core.connectors.transformers.identity import model_record
from lmcache_core.connectors.transformers.support import check_model, probe
from lmcache_core.connectors.transformers.watch import Watch
from lmcache_core.errors import UnsupportedModel
from lmcache_core.identity import ModelRecord, differences


def record_of(model: Any) -> ModelRecord:
    base = unwrapped(model)
    return model_record(base, Adapters(model, base), probe(base, Forward(base)), 64)


def fields(ours: Any, theirs: Any) -> set[str]:
    return {difference.field for difference in differences(record_of(ours), record_of(theirs))}


def test_equal_weights_and_config_are_one_model() -> None:
    assert record_of(llama()) == record_of(llama())


def test_one_changed_element_of_one_tensor_is_another_model() -> None:
    other = llama()
    with torch.no_grad():
        other.model.layers[1].mlp.up_proj.weight[5, 7] += 1e-6
    assert fields(llama(), other) == {"weights"}


def test_a_changed_buffer_that_no_file_holds_is_another_model() -> None:
    other = llama()
    other.model.rotary_emb.inv_freq.mul_(1.5)
    assert fields(llama(), other) == {"weights"}


def test_a_copy_loaded_from_a_folder_is_the_same_model(tmp_path: Path) -> None:
    model = llama()
    model.save_pretrained(tmp_path)
    assert record_of(t.AutoModelForCausalLM.from_pretrained(tmp_path).eval()) == record_of(model)


def _scaled(model: Any) -> None:
    model.model.layers[1].self_attn.scaling = 0.5


def _other_eps(model: Any) -> None:
    model.model.layers[1].input_layernorm.variance_epsilon = 0.1


def _other_activation(model: Any, kind: type[torch.nn.Module] = torch.nn.ReLU) -> None:
    model.model.layers[0].mlp.act_fn = kind()


@pytest.mark.parametrize("change", [_scaled, _other_eps, _other_activation])
def test_a_changed_setting_of_a_module_is_another_model(change: Any) -> None:
    other = llama()
    change(other)
    assert fields(llama(), other) == {"weights"}


def test_two_classes_of_one_file_are_told_apart() -> None:
    relu, hardtanh = llama(), llama()
    _other_activation(relu, torch.nn.ReLU6)
    _other_activation(hardtanh, torch.nn.Hardtanh)
    # A ReLU6 is a Hardtanh from 0 to 6: with the same attributes only the class tells them apart.
    hardtanh.model.layers[0].mlp.act_fn.__dict__.update(vars(relu.model.layers[0].mlp.act_fn))
    assert fields(relu, hardtanh) == {"weights"}


class Steer(torch.nn.Module):
    """Adds a vector that PyTorch doesn't know of: it is neither parameter nor buffer."""

    def __init__(self, inner: torch.nn.Module, vector: torch.Tensor) -> None:
        super().__init__()
        self.inner = inner
        self.vector = vector
        self.more = {"second": torch.zeros(64)}
        self.scales = [1.0, 2.0]
        self.eval()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        added: torch.Tensor = self.inner(x) + self.vector * self.scales[0] + self.more["second"]
        return added


def _steered(model: Any, strength: float = 1.0) -> None:
    mlp = model.model.layers[0].mlp
    model.model.layers[0].mlp = Steer(mlp, torch.full((64,), strength))


def test_a_tensor_that_is_a_plain_attribute_counts() -> None:
    first, again, strong, scaled, other = (llama() for _ in range(5))
    for model in (first, again, scaled, other):
        _steered(model, 1.0)
    _steered(strong, 2.0)
    scaled.model.layers[0].mlp.scales = [3.0, 2.0]
    other.model.layers[0].mlp.more["second"] = torch.ones(64)
    assert record_of(first) == record_of(again)
    assert [fields(first, model) for model in (strong, scaled, other)] == [{"weights"}] * 3
    for change in (
        lambda steer: setattr(steer, "vector", torch.ones(64)),
        lambda steer: setattr(steer, "scales", [3.0, 2.0]),
        lambda steer: steer.more.update(second=torch.ones(64)),
        lambda steer: steer.more["second"].add_(1),
    ):
        model = llama()
        _steered(model)
        watch = Watch(model)
        model(torch.tensor([[3, 4, 5]]))
        assert not watch.changed()
        change(model.model.layers[0].mlp)
        assert watch.changed()


def test_the_same_class_name_with_other_code_is_another_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    source = "import torch\n\n\nclass Act(torch.nn.Module):\n    def forward(self, x):\n        return {}\n"
    records = []
    for formula in ("x.relu()", "x.sin()", "x.sin()"):
        (tmp_path / "custom_act.py").write_text(source.format(formula))
        sys.modules.pop("custom_act", None)
        importlib.invalidate_caches()
        model = llama()
        model.model.layers[0].mlp.act_fn = importlib.import_module("custom_act").Act()
        records.append(record_of(model))
    monkeypatch.delitem(sys.modules, "custom_act")
    assert records[0] != records[1] == records[2]


def test_code_that_cannot_be_read_is_refused() -> None:
    model = llama()
    kind = type("Act", (torch.nn.ReLU,), {"__module__": "no.such.file"})
    model.model.layers[0].mlp.act_fn = kind()
    with pytest.raises(UnsupportedModel, match=r"act_fn.*define it in a file"):
        record_of(model)


def test_rope_and_dtype_are_named_as_the_difference() -> None:
    assert "config.rope_parameters.rope_theta" in fields(
        llama(), llama(rope_parameters={"rope_type": "default", "rope_theta": 5e5})
    )
    assert "config.kv_dtype" in fields(llama(), llama(dtype=torch.bfloat16))


def test_another_release_of_transformers_is_named_as_the_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    ours = record_of(llama())
    monkeypatch.setattr(t, "__version__", "5.999")
    [difference] = differences(ours, record_of(llama()))
    assert (difference.field, difference.theirs) == ("config.library", "transformers 5.999")


def test_names_lengths_and_token_roles_make_no_difference() -> None:
    other = llama(max_position_embeddings=4096, use_cache=False, bos_token_id=5)
    other.config._name_or_path = "elsewhere/model"
    assert fields(llama(), other) == set()


def test_the_maximum_length_counts_where_a_rope_type_may_read_it() -> None:
    yarn = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0}
    found = fields(
        llama(rope_parameters=dict(yarn)), llama(rope_parameters=dict(yarn), max_position_embeddings=4096)
    )
    assert "config.max_position_embeddings" in found


def test_state_that_is_no_tensor_is_refused() -> None:
    class Scaled(torch.nn.Module):
        def get_extra_state(self) -> Any:
            return {"scale": 2.0}

    model = llama()
    model.model.layers[0].mlp.scaled = Scaled()
    with pytest.raises(UnsupportedModel, match="_extra_state is a dict"):
        record_of(model)


def _in_place(model: Any) -> None:
    with torch.no_grad():
        model.lm_head.weight[0, 0] += 1


def _behind_autograd(model: Any) -> None:
    model.model.layers[0].mlp.up_proj.weight.data += 0.5


def _one_embedding(model: Any) -> None:
    model.model.embed_tokens.weight.data[77] += 0.5


def _replaced(model: Any) -> None:
    model.model.layers[1].self_attn.q_proj.weight = torch.nn.Parameter(torch.zeros(64, 64))


def _new_module(model: Any) -> None:
    model.model.layers[0].mlp.extra = torch.nn.Linear(2, 2)


def _training(model: Any) -> None:
    model.train()


def _hooked(model: Any) -> None:
    model.model.layers[0].register_forward_hook(lambda module, args, output: output + 1)


def _patched(model: Any) -> None:
    mlp = model.model.layers[0].mlp
    mlp.forward = lambda x: x


def _one_training(model: Any) -> None:
    model.model.layers[1].self_attn.train()  # attention dropout


def _configured(model: Any) -> None:
    model.config.num_hidden_layers = 1  # Llama's forward reads it


@pytest.mark.parametrize(
    "change",
    [
        *(_in_place, _behind_autograd, _one_embedding, _replaced, _new_module, _training),
        *(_one_training, _steered, _hooked, _patched, _configured, _scaled, _other_eps, _other_activation),
    ],
)
def test_the_watch_sees_a_change_and_does_not_forget_it(change: Any) -> None:
    model = llama()
    watch = Watch(model)
    model(torch.tensor([[3, 4, 5]]))
    assert not watch.changed()
    change(model)
    assert watch.changed()
    model.eval()
    assert watch.changed()


def test_the_watch_reads_inference_tensors_too() -> None:
    with torch.inference_mode():
        model = llama()
    watch = Watch(model)
    assert not watch.changed()
    with torch.inference_mode():
        model.lm_head.weight.add_(1)
    assert watch.changed()


def test_a_patched_class_is_another_model_and_a_change(monkeypatch: pytest.MonkeyPatch) -> None:
    model = llama()
    before, watch, kind = record_of(model), Watch(model), type(model.model.layers[0].mlp)
    forward = kind.forward
    monkeypatch.setattr(kind, "forward", lambda self, x: forward(self, x) * 2)
    assert watch.changed()
    assert record_of(model) != before


def test_a_hook_on_every_module_is_a_change() -> None:
    model = llama()
    watch = Watch(model)
    hook = register_module_forward_hook(lambda module, args, output: None)
    try:
        assert watch.changed()
        with pytest.raises(UnsupportedModel, match="every module has a forward hook"):
            check_model(model)
    finally:
        hook.remove()


def test_autocast_is_a_change() -> None:
    model = llama()
    watch = Watch(model)
    assert not watch.changed()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert watch.changed()


def test_the_watch_lets_be_what_changes_no_kv() -> None:
    model = llama()
    watch = Watch(model)
    model(torch.tensor([[3, 4, 5]]), output_hidden_states=True, output_attentions=True)  # installs hooks
    model.set_attn_implementation("eager")
    model.config.use_cache = False
    assert not watch.changed()


# -- adapters ------------------------------------------------------------------------------------------

# peft 0.21 asks Transformers 5.24 for an attribute that is about to be renamed.
quiet_peft = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")


def with_lora(base: Any, *, name: str = "default", seed: int = 0, **options: Any) -> Any:
    """`base` in PEFT's wrapper, with a LoRA whose B isn't zero."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(seed)
    config = LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False, **options)
    return get_peft_model(base, config, adapter_name=name).eval()


def lora_of(model: Any) -> bytes:
    return Adapters(model, unwrapped(model)).fingerprint()


@quiet_peft
def test_a_lora_leaves_the_base_model_the_same_and_has_its_own_fingerprint() -> None:
    model = with_lora(llama())
    assert record_of(model) == record_of(llama())
    assert len(lora_of(model)) == 32
    assert lora_of(llama()) == b""


@quiet_peft
def test_the_adapters_weights_and_scaling_count_and_its_name_does_not() -> None:
    first = lora_of(with_lora(llama(), seed=1))
    assert lora_of(with_lora(llama(), seed=1, name="another")) == first
    assert lora_of(with_lora(llama(), seed=2)) != first
    assert lora_of(with_lora(llama(), seed=1, lora_alpha=99)) != first


@quiet_peft
def test_switching_and_disabling_adapters_is_followed() -> None:
    from peft import LoraConfig

    model = with_lora(llama(), name="first", seed=1)
    torch.manual_seed(2)
    model.add_adapter("second", LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False))
    adapters = Adapters(model, unwrapped(model))
    watch = Watch(unwrapped(model))
    a = adapters.fingerprint()
    model.set_adapter("second")
    b = adapters.fingerprint()
    assert len({a, b, b""}) == 3
    with model.disable_adapter():
        assert adapters.fingerprint() == b""
    model.set_adapter("first")
    assert adapters.fingerprint() == a
    layer = model.get_base_model().model.layers[0].self_attn.q_proj
    layer.set_scale("first", 0.5)
    c = adapters.fingerprint()
    layer.set_scale("first", 1.0)
    assert c != a == adapters.fingerprint()
    assert not watch.changed()


@quiet_peft
def test_merging_an_adapter_is_a_change_of_weights() -> None:
    model = with_lora(llama())
    watch = Watch(unwrapped(model))
    model.merge_adapter()
    assert watch.changed()
    assert lora_of(model) == b""
    assert fields(llama(), model) == {"weights"}


@quiet_peft
def test_adapters_that_cannot_be_told_are_refused() -> None:
    from peft import IA3Config, PromptTuningConfig, get_peft_model

    with pytest.raises(UnsupportedModel, match="only LoRA"):
        lora_of(get_peft_model(llama(), IA3Config(target_modules=["k_proj"], feedforward_modules=[])))
    with pytest.raises(UnsupportedModel, match="LoRA variant"):
        lora_of(with_lora(llama(), use_dora=True))
    with pytest.raises(UnsupportedModel, match="modules_to_save"):
        lora_of(with_lora(llama(), modules_to_save=["embed_tokens"]))
    prompts = PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4)
    with pytest.raises(UnsupportedModel, match="no ids"):
        lora_of(get_peft_model(llama(), prompts))
