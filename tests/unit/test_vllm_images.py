"""vLLM: what of an engine's configuration decides how an image becomes KV, beside vLLM's hash of it."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from vllm_by_hand import vllm_config

from lmcache_core.connectors.vllm.identity import model_record
from lmcache_core.connectors.vllm.known_as import in_vllm_s_words
from lmcache_core.connectors.vllm.support import check_config
from lmcache_core.errors import UnsupportedModel
from lmcache_core.identity import FieldDifference, ModelRecord, differences


def images(**changes: Any) -> SimpleNamespace:
    """vLLM's multimodal config, as it is when nothing is said."""
    said = {
        "language_model_only": False,
        "mm_processor_cache_gb": 4,
        "mm_encoder_attn_dtype": None,
        "mm_processor_kwargs": None,
        "media_io_kwargs": {},
        "video_pruning_rate": None,
        "video_pruning_method": "evs",
    }
    return SimpleNamespace(**{**said, **changes})


def config(prefix_caching: bool, **changes: Any) -> Any:
    changed = vllm_config(model_config__multimodal_config=images(**changes))
    changed.cache_config.enable_prefix_caching = prefix_caching
    return changed


def test_images_that_vllm_only_numbers_are_refused() -> None:
    """The numbers begin anew with each start: another image would be served."""
    with pytest.raises(UnsupportedModel, match="mm_processor_cache_gb 0 and without prefix caching"):
        check_config(config(False, mm_processor_cache_gb=0))


def test_images_that_vllm_hashes_are_served() -> None:
    check_config(config(True, mm_processor_cache_gb=0))
    check_config(config(False))
    check_config(config(False, mm_processor_cache_gb=0, language_model_only=True))


def test_an_encoder_with_scales_of_its_own_is_refused() -> None:
    with pytest.raises(UnsupportedModel, match="encoder of images in fp8"):
        check_config(config(True, mm_encoder_attn_dtype="fp8"))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "model.safetensors").write_bytes(b"a")
    (tmp_path / "preprocessor_config.json").write_text('{"size": 224}')
    return tmp_path


def record(folder: Path, multimodal: object = None, **changes: Any) -> ModelRecord:
    return model_record(vllm_config(folder, model_config__multimodal_config=multimodal, **changes), 256, None)


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"mm_processor_kwargs": {"max_pixels": 1000}}, "config.mm_processor_kwargs"),
        ({"media_io_kwargs": {"video": {"num_frames": 8}}}, "config.media_io_kwargs"),
        ({"video_pruning_rate": 0.5}, "config.video_pruning"),
    ],
)
def test_how_the_engine_prepares_images_is_in_the_record(
    folder: Path, changes: dict[str, Any], field: str
) -> None:
    plain, told = record(folder, images()), record(folder, images(**changes))
    assert {each.field for each in differences(plain, told)} == {field}
    assert record(folder, images(**changes)) == told


def test_the_processor_s_files_are_in_the_record_of_a_model_with_images(folder: Path) -> None:
    with_images, without = record(folder, images()), record(folder)
    (folder / "preprocessor_config.json").write_text('{"size": 448}')
    assert [each.field for each in differences(with_images, record(folder, images()))] == [
        "config.mm_processor"
    ]
    assert record(folder) == without


def test_what_the_weights_are_quantised_with_is_in_the_record(folder: Path) -> None:
    first, second = (
        record(folder, model_config__quantization_config={"linear": "fp8", "ignore": [ignored]})
        for ignored in ("lm_head", "model.layers.0")
    )
    assert [each.field for each in differences(first, second)] == ["config.quantization_options"]


def test_an_option_inside_an_option_is_told_as_that_option() -> None:
    told = FieldDifference(field="config.mm_processor_kwargs.max_pixels", ours=1, theirs=2)
    assert in_vllm_s_words(told) == "--mm-processor-kwargs"
    assert in_vllm_s_words(FieldDifference(field="config.hidden_size", ours=1, theirs=2)) == ""
