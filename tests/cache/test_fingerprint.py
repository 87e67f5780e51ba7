"""Fingerprints: equal for what computes the same, in every process; different, or none, for all that might not."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
import textwrap
import threading
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from sardonyx.cache import provenance
from sardonyx.cache.fingerprint import fingerprint

USUAL = """
import dataclasses, enum, functools, math
import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
"""


def made(source: str, **given: object) -> nn.Module:
    """The module that a user's source calls `model`."""
    own = types.ModuleType("users_own")
    vars(own).update(given)
    with patch.dict(sys.modules, {"users_own": own}):  # for dataclasses
        exec(USUAL + textwrap.dedent(source), vars(own))
    model = own.model
    assert isinstance(model, nn.Module)
    return model


def known(module: nn.Module) -> str:
    found = fingerprint(module)
    assert found is not None
    return found


def forward(body: str, before: str = "", *, init: str = "pass") -> str:
    return f"""
{textwrap.dedent(before)}
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        {init}

    def forward(self, a):
        return {body}

model = Model()
"""


CLOSURE = """
def scaled(by):
    def scale(a):
        return a * by
    return scale

scale = scaled({})
"""
DATACLASS = """
@dataclasses.dataclass
class Config:
    width: int = 3
    scale: float = {}

config = Config()
"""
ENUM = """
class Kind(enum.Enum):
    ONE = {}
"""
BASE = """
class Base(nn.Module):
    def scale(self, a):
        return a * {}

class Model(Base):
    def forward(self, a):
        return self.scale(a)

model = Model()
"""
DECORATED = """
class Model(nn.Module):
    @torch.no_grad()
    def forward(self, a):
        return a * {}

model = Model()
"""
PAIRS: dict[str, tuple[str, object, object]] = {
    "a factor": (forward("a * {}"), 2, 3),
    "an axis": (forward("a.sum({})"), 0, 1),
    "the kind of a number": (forward("a * {}"), 2, 2.0),
    "the sign of a zero": (forward("a * {}"), 0.0, -0.0),
    "an operator": (forward("a {} 2"), "+", "-"),
    "a function of torch": (forward("torch.{}(a)"), "sin", "cos"),
    "a function of another module": (forward("F.{}(a)"), "relu", "gelu"),
    "a global number": (forward("a * SCALE", "SCALE = {}"), 2, 3),
    "a global tensor": (forward("a * SCALE", "SCALE = torch.tensor([1.0, {}])"), 2.0, 3.0),
    "a global list": (forward("a * SCALES[1]", "SCALES = [1, {}]"), 2, 3),
    "a helper": (forward("helper(a)", "def helper(a): return a * {}"), 2, 3),
    "a helper's helper": (forward("g(a)", "def f(a): return a * {}\ndef g(a): return f(a)"), 2, 3),
    "a default": (forward("helper(a)", "def helper(a, by={}): return a * by"), 2, 3),
    "a default by keyword": (forward("helper(a)", "def helper(a, *, by={}): return a * by"), 2, 3),
    "a closure": (forward("scale(a)", CLOSURE), 2, 3),
    "a lambda": (forward("self.f(a)", init="self.f = lambda a: a * {}"), 2, 3),
    "a lambda inside": (forward("(lambda x: x * {})(a)"), 2, 3),
    "a partial": (forward("self.f(a)", init="self.f = functools.partial(torch.mul, {})"), 2, 3),
    "a cached helper": (forward("f() * a", "@functools.cache\ndef f(): return {}"), 2, 3),
    "an attribute": (forward("a * self.scale", init="self.scale = {}"), 2, 3),
    "a nested attribute": (forward("a * self.s['x'][0]", init="self.s = {{'x': [{}]}}"), 2, 3),
    "a set": (forward("a * len(self.s)", init="self.s = {{'x', {}}}"), 2, "'x'"),
    "a tensor that is no weight": (forward("a * self.s", init="self.s = torch.tensor({})"), 2.0, 3.0),
    "tensors in a list": (forward("a * self.s[0]", init="self.s = [torch.tensor({})]"), 2.0, 3.0),
    "an array": (forward("a * self.s", init="self.s = np.array([{}])"), 2.0, 3.0),
    "a dtype": (forward("a.to(self.d)", init="self.d = torch.{}"), "float16", "bfloat16"),
    "a configuration": (forward("a * config.scale", DATACLASS), 2.0, 3.0),
    "a tensor in a namespace": (
        forward("a * self.s.x", "import types", init="self.s = types.SimpleNamespace(x=torch.arange(9999) == {})"),
        5000,
        5001,
    ),
    "an enumeration": (forward("a * Kind.ONE.value", ENUM), 2, 3),
    "a base class": (BASE, 2, 3),
    "code behind a decorator": (DECORATED, 2, 3),
    "a class attribute": (forward("a * S.by", "class S: by = {}"), 2, 3),
    "a property": (forward("a * S().by", "class S:\n    @property\n    def by(self): return {}"), 2, 3),
    "a static method": (forward("S.by(a)", "class S:\n    @staticmethod\n    def by(a): return a * {}"), 2, 3),
    "a method of its instance": (forward("a", init="self.forward = lambda a: a * {}"), 2, 3),
    "the order of submodules": ("model = nn.Sequential({})", "nn.ReLU(), nn.GELU()", "nn.GELU(), nn.ReLU()"),
    "a submodule's setting": ("model = nn.Sequential(nn.LeakyReLU({}))", 0.1, 0.2),
    "a width": ("model = nn.Linear(3, {})", 4, 5),
    "a weight's dtype": ("model = nn.Linear(3, 4, dtype=torch.{})", "float32", "float64"),
    "a weight that is the same as another": (
        "model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)); {}",
        "pass",
        "model[1].weight = model[0].weight",
    ),
    "the training flag": ("model = nn.Dropout(); model.train({})", True, False),
    "a hook": ("model = nn.ReLU(); {}", "pass", "model.register_forward_hook(lambda m, a, out: out * 2)"),
    "a hook's code": ("model = nn.ReLU(); model.register_forward_hook(lambda m, a, out: out * {})", 2, 3),
    "a hook before": ("model = nn.ReLU(); model.register_forward_pre_hook(lambda m, a: a[0] * {})", 2, 3),
}


@pytest.fixture
def pristine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Saves looking through all packages where nothing in them was replaced."""
    monkeypatch.setattr(provenance, "monkeypatches", lambda packages: iter(()))


@pytest.mark.usefixtures("pristine")
@pytest.mark.parametrize(("source", "one", "other"), PAIRS.values(), ids=PAIRS.keys())
def test_what_differs_has_another_fingerprint(source: str, one: object, other: object) -> None:
    first, same, different = (known(made(source.format(what))) for what in (one, one, other))
    assert first == same
    assert first != different


UNUSED = """
class Helper:
    def __init__(self):
        self.by = 2
        open("x") if {0} else None

    def __hash__(self):
        return hash("x")

helper = Helper()

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.by = helper if {0} else helper

    def save(self, path):
        open(path, "w").write(str({0}))

    def forward(self, a):
        return a * self.by.by

model = Model()
"""
USED = """
class Helper:
    def __init__(self):
        self.by = {}

class Model(nn.Module):
    def scale(self, a):
        return self.times(a, Helper().by)

    def times(self, a, by):
        return a * by

    def forward(self, a):
        return {}

model = Model()
"""


@pytest.mark.usefixtures("pristine")
def test_what_forward_does_not_use_makes_no_difference() -> None:
    assert known(made(UNUSED.format(0))) == known(made(UNUSED.format(0.0)))


@pytest.mark.usefixtures("pristine")
@pytest.mark.parametrize("use", ["self.scale(a)", "getattr(self, 'sca' + 'le')(a)", "type(self).scale(self, a)"])
def test_what_forward_uses_makes_a_difference_however_deep(use: str) -> None:
    assert known(made(USED.format(2, use))) != known(made(USED.format(3, use)))


OVERRIDING = """
class Model(nn.MultiheadAttention):
    def merge_masks(self, *given):
        return {}

model = Model(4, 2)
"""


@pytest.mark.usefixtures("pristine")
def test_a_method_that_a_package_may_call_makes_a_difference() -> None:
    assert known(made(OVERRIDING.format("None, None"))) != known(made(OVERRIDING.format("None, 1")))


def test_weights_and_buffers_count_by_their_shape_alone() -> None:
    first, second = nn.BatchNorm1d(3), nn.BatchNorm1d(3)
    with torch.no_grad():
        second.weight.fill_(5.0)
        second.running_mean.fill_(7.0)
    assert known(first) == known(second) != known(nn.BatchNorm1d(4))


def test_a_weight_found_in_a_list_as_well_is_still_a_weight() -> None:
    assert known(nn.LSTM(3, 4)) == known(nn.LSTM(3, 4)) != known(nn.LSTM(3, 4, num_layers=2))


def test_the_name_of_the_users_module_makes_no_difference() -> None:
    source = forward("torch.relu(a) * 2")
    assert known(made(source, __name__="one")) == known(made(source, __name__="two"))


def test_calling_a_module_does_not_change_its_fingerprint() -> None:
    model = made(DATACLASS.format(2.0) + forward("a * self.c.scale", init="self.c = config"))
    before = known(model)
    model(torch.ones(2))
    assert known(model) == before


@pytest.mark.parametrize("by", [2, 3])
def test_a_function_of_a_module_of_the_users_own_counts_by_its_code(monkeypatch: pytest.MonkeyPatch, by: int) -> None:
    def model(by: int, unused: int = 0) -> nn.Module:
        helpers = types.ModuleType("helpers")
        exec(f"def double(a): return a * {by}\nunused = {unused}", vars(helpers))
        monkeypatch.setitem(sys.modules, "helpers", helpers)
        return made(forward("helpers.double(a)", "import helpers"))

    assert known(model(by)) == known(model(by, unused=1)) != known(model(by + 1))


SETTINGS: dict[str, Callable[[], Any]] = {
    "grad mode": torch.enable_grad,
    "inference mode": torch.inference_mode,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "attention": lambda: torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH),
}


@pytest.mark.parametrize("setting", SETTINGS.values(), ids=SETTINGS.keys())
def test_global_settings_count(setting: Callable[[], Any]) -> None:
    model = nn.Linear(3, 4)
    outside = known(model)
    with setting():
        assert known(model) != outside
    assert known(model) == outside


def test_the_default_dtype_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.ReLU()
    before = known(model)
    torch.set_default_dtype(torch.float64)
    try:
        assert known(model) != before
    finally:
        torch.set_default_dtype(torch.float32)


# What cannot be told

UNCERTAIN = {
    "the time": forward("a * time.time()", "import time"),
    "the time by another name": forward("a * now()", "from time import time as now"),
    "random numbers of Python": forward("a * random.random()", "import random"),
    "a random function": forward("a * draw()", "from random import random as draw"),
    "random numbers of numpy": forward("a * np.random.rand()"),
    "the environment": forward("a if os.environ.get('X') else -a", "import os"),
    "a file": forward("a * float(open('x').read())"),
    "code from text": forward("eval('a * 2')"),
    "an address": forward("a * id(a)"),
    "a module imported while it runs": forward("helper()", "def helper():\n    from nowhere import f\n    return f"),
    "a module imported from beside it": forward("helper()", "def helper():\n    from . import f\n    return f"),
    "an operator of others": forward("torch.ops.mine.double(a)"),
    "a generator": forward("a", init="self.g = torch.Generator()"),
    "an object written in C": forward("a", "import threading", init="self.lock = threading.Lock()"),
    "all subclasses": forward("nn.Module.__subclasses__()"),
    "a masked array": forward("a", init="self.m = np.ma.masked_array([1, 2], [0, 1])"),
    "a descriptor of the user's": forward("a", "class P(property): pass", init="self.p = P(len)"),
    "a set of objects": forward("a", init="self.s = {nn.ReLU()}"),
    "an array of objects": forward("a", init="self.s = np.array([object()])"),
    "a weight without a shape": "model = nn.LazyLinear(3)",
    "compiled code": "model = torch.jit.script(nn.ReLU())",
    "a traced graph": "model = torch.fx.symbolic_trace(nn.ReLU())",
}


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
@pytest.mark.parametrize("source", UNCERTAIN.values(), ids=UNCERTAIN.keys())
def test_what_cannot_be_told_has_no_fingerprint(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with torch.library._scoped_library("mine", "DEF") as library:
        library.define("double(Tensor a) -> Tensor")
        assert fingerprint(made(source)) is None


def test_anything_may_be_taken_from_a_module_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "helpers", types.ModuleType("helpers"))
    assert fingerprint(made(forward("getattr(helpers, 'x')(a)", "import helpers"))) is None


def test_a_module_that_is_handed_on_is_uncertain(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "helpers", types.ModuleType("helpers"))
    assert fingerprint(made(forward("use(helpers)", "import helpers\ndef use(given): return given.f()"))) is None


def test_an_active_mode_of_torch_is_uncertain() -> None:
    with torch.device("meta"):
        assert fingerprint(nn.ReLU()) is None


def softmax(x: torch.Tensor, dim: int) -> torch.Tensor:
    return x


class Softmax:
    def __call__(self, x: torch.Tensor, dim: int) -> torch.Tensor:
        return x


REPLACEMENTS: dict[str, Any] = {
    "a function": softmax,
    "a partial": functools.partial(softmax, dim=1),
    "an object": Softmax(),
    "a method": Softmax().__call__,
    "a decorated function": torch.no_grad()(softmax),
}


@pytest.mark.parametrize("replacement", REPLACEMENTS.values(), ids=REPLACEMENTS.keys())
def test_a_function_of_torch_that_was_replaced_is_uncertain(monkeypatch: pytest.MonkeyPatch, replacement: Any) -> None:
    model = nn.Softmax(1)
    before = known(model)
    monkeypatch.setattr(F, "softmax", replacement)
    assert fingerprint(model) is None
    monkeypatch.undo()
    assert known(model) == before


def test_a_method_of_torch_that_was_replaced_is_uncertain(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nn.Linear, "forward", lambda self, x: x)
    assert fingerprint(nn.Sequential(nn.ReLU())) is None


def test_a_method_of_tensors_that_was_replaced_is_uncertain(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.Tensor, "relu", lambda self: self, raising=False)
    assert fingerprint(nn.ReLU()) is None


def test_a_function_of_torch_replaced_by_another_of_torch_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.ReLU()
    before = known(model)
    monkeypatch.setattr(torch, "relu", torch.sigmoid)
    assert fingerprint(model) != before


def test_a_function_put_into_a_table_of_a_package_is_uncertain(monkeypatch: pytest.MonkeyPatch) -> None:
    bert = pytest.importorskip("transformers.models.bert.modeling_bert")
    model = bert.BertIntermediate(bert.BertConfig(hidden_size=8, intermediate_size=8))
    assert fingerprint(model) is not None
    monkeypatch.setitem(type(bert.ALL_ATTENTION_FUNCTIONS)._global_mapping, "sdpa", softmax)
    assert fingerprint(model) is None


def test_a_thread_lock_elsewhere_is_no_concern() -> None:
    made(forward("a * 2"), lock=threading.Lock())
    assert known(made(forward("a * 2"), lock=threading.Lock(), unused=np.array([object()])))


# Processes

PROGRAM = """
import json, sys
sys.path.insert(0, sys.argv[1])
import transformers
from sardonyx.cache.fingerprint import fingerprint
from own_model import Own

config = transformers.BertConfig(num_hidden_layers=2, hidden_size=16, num_attention_heads=2, intermediate_size=16)
generating = transformers.GPT2Config(n_layer=1, n_embd=8, n_head=2, vocab_size=8, bos_token_id=0, eos_token_id=0)
models = [transformers.BertModel(config), transformers.GPT2LMHeadModel(generating), Own()]
print(json.dumps([fingerprint(model) for model in models]))
"""
OWN = """
import dataclasses
import torch
from torch import nn

NAMES = {"one", "two", "three", "four"}


@dataclasses.dataclass(frozen=True)
class Config:
    scale: float = 2.0
    names: frozenset = frozenset({"alpha", "beta", "gamma"})


class Own(nn.Module):
    def __init__(self, config=Config()):
        super().__init__()
        self.config, self.linear, self.noise = config, nn.Linear(3, 4), {"a": torch.arange(3)}

    def forward(self, x):
        if "x" in {"x", "y", "z"} and len(NAMES) == 4:
            x = x * self.config.scale
        return self.linear(x)
"""


def test_fingerprints_are_the_same_in_another_process(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    found = []
    for seed in ("1", "2"):
        folder = tmp_path / seed
        folder.mkdir()
        (folder / "own_model.py").write_text(OWN)
        command = [sys.executable, "-c", PROGRAM, str(folder)]
        done = subprocess.run(
            command, capture_output=True, text=True, check=True, env={**os.environ, "PYTHONHASHSEED": seed}
        )
        found.append(json.loads(done.stdout))
    assert found[0] == found[1]
    assert None not in found[0]
