"""Compile an ONNX file to native code with IREE: `python -P iree_compile.py model.onnx model.vmfb FLAGS`.

This runs in a subprocess because a failed assertion ends the compiler's process. It imports nothing of this package, to
start fast.
"""

from __future__ import annotations

import io
import os
import sys
from typing import Any


def main(source: str, target: str, *flags: str) -> int:
    """Compile; the compiler's messages go to stderr."""
    from iree.compiler import api

    session = api.Session()
    session.set_flags(*flags)
    invocation, output = session.invocation(), api.Output.open_file(target)
    invocation.enable_console_diagnostics()
    code = _import_to_mlir(_with_inferred_shapes(source))
    if not invocation.parse_source(api.Source.wrap_buffer(session, code)) or not invocation.execute():
        return 1
    invocation.output_vm_bytecode(output)
    output.keep()
    return 0


def _with_inferred_shapes(source: str) -> Any:
    """Return the model with inferred shapes: the importer treats a value without a shape as a scalar."""
    import onnx

    model = onnx.shape_inference.infer_shapes(onnx.load(source, load_external_data=False), data_prop=True)
    onnx.load_external_data_for_model(model, os.path.dirname(source))
    return model


def _import_to_mlir(model: Any) -> bytes:
    from iree.compiler import ir
    from iree.compiler.extras import onnx_importer

    with ir.Context() as context:
        info, buffer = onnx_importer.ModelInfo(model), io.BytesIO()
        module = info.create_module(context=context).operation
        onnx_importer.NodeImporter.define_function(info.main_graph, module).import_all()
        module.write_bytecode(buffer)
    return buffer.getvalue()


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
