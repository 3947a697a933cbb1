"""`examples/explain_model.py`: a ConvNet, and a transformer where `transformers` is installed."""

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

import fxddp

EXAMPLE = Path(__file__).resolve().parent.parent / "examples" / "explain_model.py"


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    torch._dynamo.reset()
    spec = importlib.util.spec_from_file_location("explain_model", EXAMPLE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "explain_model", module)
    spec.loader.exec_module(module)
    return module


def test_a_convnet_is_explained(example: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    outputs = ["--html", str(tmp_path / "page.html"), "--trace", str(tmp_path / "trace.json")]
    assert example.main(["--small", "--bucket-mb", "0.01", *outputs]) == 0
    shown = capsys.readouterr().out
    assert "ConvNet on 64 ranks: 1 graph" in shown
    assert "explain_model.py" in shown
    found = fxddp.Explanation.load(tmp_path / "page.html")
    assert not found.uncovered
    assert found.device == "cuda"
    assert json.loads((tmp_path / "trace.json").read_text())["traceEvents"]


@pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="transformers is not installed here")
def test_a_transformer_is_explained(example: ModuleType, capsys: pytest.CaptureFixture) -> None:
    assert example.main(["--model", "llama", "--small"]) == 0
    assert "LlamaForCausalLM on 64 ranks: 1 graph" in capsys.readouterr().out


def test_what_is_missing_is_named(example: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SystemExit, match="pip install transformers"):
        example.main(["--model", "llama"])
