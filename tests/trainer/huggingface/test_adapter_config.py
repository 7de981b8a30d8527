"""adapter_config.json of any content: read, or refused by the field's name."""
import json

import pytest

from model.adapter import AdapterConfig
from trainer.huggingface.peft import CONFIG, read_config, write_config

GOOD = AdapterConfig(rank=4, alpha=8.0, targets=("q_proj", "v_proj"), dropout=0.1)


def test_what_is_written_is_read(tmp_path):
    write_config(GOOD, "llama", "a base", tmp_path)
    assert read_config(tmp_path) == (GOOD, "a base")


@pytest.mark.parametrize(("change", "words"), [
    ({"r": "4"}, "r: '4' is not a whole number"), ({"r": True}, "r: True"), ({"lora_alpha": 10**400}, "lora_alpha"),
    ({"lora_alpha": float("nan")}, "lora_alpha"), ({"target_modules": [1]}, r"target_modules: found \[1\]"),
    ({"target_modules": {"a": 1}}, "target_modules: found"), ({"target_modules": None}, "adapter.targets: found 'none'"),
    ({"modules_to_save": [None]}, "modules_to_save: found"),
    ({"peft_type": "IA3"}, "peft_type: found 'IA3'; only 'LORA' is read"),
])
def test_a_field_of_another_type_is_named(tmp_path, change, words):
    write_config(GOOD, "llama", "a base", tmp_path)
    content = json.loads((tmp_path / CONFIG).read_text())
    (tmp_path / CONFIG).write_text(json.dumps(content | change))
    with pytest.raises(ValueError, match=rf"^{tmp_path / CONFIG}: {words}"):
        read_config(tmp_path)


@pytest.mark.parametrize("text", ["[]", "1", "", "{", "\xff", "[" * 100_000])
def test_a_file_that_is_no_object_is_named(tmp_path, text):
    (tmp_path / CONFIG).write_text(text, encoding="latin-1")
    with pytest.raises(ValueError, match=rf"^{tmp_path / CONFIG}: "):
        read_config(tmp_path)
