"""Triton's interpreter with the conversions and products of a GPU.

Importing this sets TRITON_INTERPRET, so it must come before triton, in a process of its own. The
interpreter of Triton 3.7.1 truncates where a GPU rounds to nearest, rounds wrongly to e4m3, and
multiplies the raw bits of bf16. torch converts all of them as a GPU does, but for e5m2, where a GPU
saturates and torch gives infinity.
"""
import os

os.environ["TRITON_INTERPRET"] = "1"

import numpy as np  # noqa: E402
import torch  # noqa: E402
import triton.language as tl  # noqa: E402
from triton.runtime import interpreter  # noqa: E402

DTYPES = {"fp8e4nv": torch.float8_e4m3fn, "fp8e5": torch.float8_e5m2, "bf16": torch.bfloat16,
          "fp16": torch.float16, "fp32": torch.float32}
BITS = {8: torch.int8, 16: torch.int16, 32: torch.int32}
LARGEST_E5M2 = 57344.0
_convert = interpreter._convert_float


def convert(x: np.ndarray, source, target, mode) -> np.ndarray:
    """Floats as bits of `source` -> bits of `target`, rounded to nearest even, saturated."""
    if not {source.name, target.name} <= set(DTYPES) or mode == interpreter._ir.ROUNDING_MODE.RTZ:
        return _convert(x, source, target, mode)
    bits = np.array(x, order="C").view(f"i{source.primitive_bitwidth // 8}")
    value = torch.from_numpy(bits).view(DTYPES[source.name])
    if target.name == "fp8e5":
        value = value.float()
        value = torch.where(value.isnan(), value, value.clamp(-LARGEST_E5M2, LARGEST_E5M2))
    result = value.to(DTYPES[target.name]).view(BITS[target.primitive_bitwidth]).numpy()
    return result.view(f"u{target.primitive_bitwidth // 8}").reshape(np.shape(x))


def product(builder, a, b, total, input_precision, max_num_imprecise_acc):
    """tl.dot: exact products, fp32 sums."""
    def wide(handle) -> np.ndarray:
        kind = handle.dtype.scalar
        if kind.name not in DTYPES:
            return handle.data
        return convert(handle.data, kind, tl.float32, None).view(np.float32)

    data = np.matmul(wide(a), wide(b), dtype=total.data.dtype) + total.data
    return interpreter.TensorHandle(data, total.dtype.scalar)


interpreter._convert_float = convert
interpreter.InterpreterBuilder.create_dot = product
