"""Cases of operators of onnxruntime's own domain, which onnx has no node tests of."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

MICROSOFT = "com.microsoft"
CASES: dict[str, tuple[str, str, Mapping[str, Sequence[int]], Sequence[str], Mapping[str, object]]] = {
    "gelu": ("Gelu", MICROSOFT, {"x": [3, 37]}, ["y"], {}),
    "bias_gelu": ("BiasGelu", MICROSOFT, {"x": [3, 37], "b": [37]}, ["y"], {}),
    "fast_gelu": ("FastGelu", MICROSOFT, {"x": [3, 37]}, ["y"], {}),
    "fast_gelu_bias": ("FastGelu", MICROSOFT, {"x": [3, 37], "b": [37]}, ["y"], {}),
    "quick_gelu": ("QuickGelu", MICROSOFT, {"x": [3, 37]}, ["y"], {"alpha": 1.5}),
    "simplified": ("SimplifiedLayerNormalization", "", {"x": [3, 5, 37], "s": [37]}, ["y"], {"epsilon": 1e-3}),
    "fused_matmul": ("FusedMatMul", MICROSOFT, {"x": [37, 37], "w": [37, 37]}, ["y"], {"transB": 1, "alpha": 0.5}),
    "skip": ("SkipLayerNormalization", MICROSOFT, {"x": [2, 5, 37], "k": [2, 5, 37], "g": [37]}, ["y"], {}),
    "skip_all": (
        "SkipLayerNormalization",
        MICROSOFT,
        {"x": [2, 5, 37], "k": [2, 5, 37], "g": [37], "be": [37], "b": [37]},
        ["y", "", "", "s"],
        {"epsilon": 1e-3},
    ),
    "skip_simplified": (
        "SkipSimplifiedLayerNormalization",
        MICROSOFT,
        {"x": [2, 5, 37], "k": [2, 5, 37], "g": [37], "b": [37]},
        ["y", "", "", "s"],
        {"epsilon": 1e-3},
    ),
}
