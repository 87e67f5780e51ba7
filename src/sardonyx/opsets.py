"""The versions of ONNX that this package depends on, each named for what it brought."""

from __future__ import annotations

IR_VERSION = 10
"""Of models that are made here. Engines that are a year old read no later one."""

TENSOR_AXES = 13
"""Squeeze, Unsqueeze, ReduceSum and Split with axes and sizes as inputs: the oldest that kernels are printed for."""
ALL_TENSOR_AXES = 18
"""Every reduction with axes as inputs, as translations and rules write them."""
GELU = 20
"""Gelu, GridSample of volumes, DFT with its axis as an input."""
CHANNEL_SCALES = 21
"""GroupNormalization with a scale for each channel, where it was one for each group."""
BLOCK_SCALES = 21
"""DequantizeLinear with a scale for each block, and tensors of int4."""
POOLING_TYPES = 22
"""MaxPool, InstanceNormalization, Elu and others for further types."""
ATTENTION = 23
"""Attention, RMSNormalization, RotaryEmbedding."""

OLDEST = ALL_TENSOR_AXES
"""The oldest that models are written in."""
NEWEST = ATTENTION
"""The newest that models are written in by default."""
