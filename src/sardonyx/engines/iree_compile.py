"""An ONNX file to native code by IREE: `python -P iree_compile.py model.onnx model.vmfb FLAGS`, a program of its own.

A compiler that fails an assertion ends its process, so it has one. It imports nothing of this package, to start fast.
"""

from __future__ import annotations

import io
import os
import sys
from typing import Any


def main(source: str, target: str, *flags: str) -> int:
    """Compile; what the compiler says goes to stderr."""
    from iree.compiler import api

    session = api.Session()
    session.set_flags(*flags)
    invocation, output = session.invocation(), api.Output.open_file(target)
    invocation.enable_console_diagnostics()
    code = _imported(_described(source))
    if not invocation.parse_source(api.Source.wrap_buffer(session, code)) or not invocation.execute():
        return 1
    invocation.output_vm_bytecode(output)
    output.keep()
    return 0


def _described(source: str) -> Any:
    """The model with the sizes of all values: the importer takes a value without any for one without dimensions."""
    import onnx

    model = onnx.shape_inference.infer_shapes(onnx.load(source, load_external_data=False), data_prop=True)
    onnx.load_external_data_for_model(model, os.path.dirname(source))
    return model


def _imported(model: Any) -> bytes:
    from iree.compiler import ir
    from iree.compiler.extras import onnx_importer

    with ir.Context() as context:
        described, written = onnx_importer.ModelInfo(model), io.BytesIO()
        module = described.create_module(context=context).operation
        onnx_importer.NodeImporter.define_function(described.main_graph, module).import_all()
        module.write_bytecode(written)
    return written.getvalue()


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
