// Checks before a kernel runs, and the conversion of exceptions to messages.
#pragma once

namespace sardonyx::detail {

// Every operator of the library, for the CPU and for the GPU.
inline std::vector<const Entry*>& registered_entries() {
  static std::vector<const Entry*> entries;
  return entries;
}

inline const char* type_name(int type) {
  static const char* const names[] = {"undefined", "float32", "uint8",   "int8",    "uint16", "int16",
                                      "int32",     "int64",   "string",  "bool",    "float16", "float64",
                                      "uint32",    "uint64",  "complex64", "complex128", "bfloat16"};
  return type >= 0 && type <= 16 ? names[type] : "of a type that has no kernels";
}

inline std::string dimensions(int64_t rank) { return std::to_string(rank) + (rank == 1 ? " dimension" : " dimensions"); }

// Selects the kernel for tensors of these types; a variadic input has one type.
inline const Instance& select(const Operator& op, const int* types) {
  auto fits = [&](const Instance& instance, int inputs) {
    for (int i = 0; i < inputs; ++i) {
      if (types[i] && types[i] != instance.input_types[i]) return false;
    }
    return true;
  };
  for (int k = 0; k < op.instance_count; ++k) {
    if (fits(op.instances[k], op.input_count)) return op.instances[k];
  }
  for (int i = 0; i < op.input_count; ++i) {
    bool any = false;
    std::string can_be;
    for (int k = 0; k < op.instance_count; ++k) {
      any |= fits(op.instances[k], i + 1);
      if (!fits(op.instances[k], i)) continue;
      const std::string name = type_name(op.instances[k].input_types[i]);
      if ((can_be + ",").find(" " + name + ",") == std::string::npos) can_be += (can_be.empty() ? " " : ", ") + name;
    }
    if (!any) {
      fail(std::string(op.inputs[i].name) + " is " + type_name(types[i]) + ", and " + (i ? "with what comes before it " : "") +
           "can be" + can_be);
    }
  }
  fail("it has no kernels");
}

// Checks the inputs and evaluates the shape rule; sizes that the kernel decides are -1.
inline void prepare(const Operator& op, const Call& call) {
  Sizes inputs[kMaxTensors], outputs[kMaxTensors];
  const bool variadic = op.input_count && op.inputs[op.input_count - 1].kind == Kind::kVariadic;
  const int64_t count = op.input_count + (variadic ? call.variadic - 1 : 0);
  for (int64_t i = 0; i < count; ++i) {
    const Array& array = call.inputs[i];
    const Parameter& parameter = op.inputs[std::min<int64_t>(i, op.input_count - 1)];
    if (parameter.kind != Kind::kOptional && !array.present()) fail(std::string(parameter.name) + " is missing");
    if (array.present() && parameter.rank >= 0 && array.rank != parameter.rank) {
      fail(std::string(parameter.name) + " has " + dimensions(array.rank) + ", and must have " + std::to_string(parameter.rank));
    }
    inputs[i].rank = array.rank;
    for (int64_t d = 0; d < array.rank; ++d) inputs[i].dims[d] = array.dims[d];
  }
  op.shapes(inputs, call.variadic, call.attributes, outputs);
  for (int i = 0; i < op.output_count; ++i) {
    Array& result = call.outputs[i];
    const Parameter& parameter = op.outputs[i];
    int64_t dims[kMaxDims];
    bool open = false;
    for (int64_t d = 0; d < outputs[i].rank; ++d) {
      dims[d] = outputs[i].dims[d].value;
      if (!outputs[i].dims[d].known) open = true;
      else if (dims[d] < 0) {
        fail("its shape rule gives " + std::string(parameter.name) + " the size " + std::to_string(dims[d]) + " in dimension " +
             std::to_string(d));
      }
    }
    if (parameter.rank >= 0 && outputs[i].rank != parameter.rank) {
      fail("its shape rule gives " + std::string(parameter.name) + " " + dimensions(outputs[i].rank) + ", and the signature says " +
           std::to_string(parameter.rank));
    }
    result.set(dims, outputs[i].rank);
    if (!open) call.allocator(i, result);
  }
}

// Checks the call, allocates the results and runs the kernel.
inline void run(const Operator& op, const Instance& instance, const Call& call) {
  prepare(op, call);
  instance.run(call);
  for (int i = 0; i < op.output_count; ++i) {
    if (!call.outputs[i].ready) {
      fail("the kernel did not resize " + std::string(op.outputs[i].name) + ", whose sizes the shape rule leaves to it");
    }
  }
}

// Returns the message of the current exception, prefixed with the operator's name.
inline std::string error_message(const Operator& op) {
  std::string what = "the kernel threw something that is not a std::exception";
  try {
    throw;
  } catch (const std::exception& error) {
    what = error.what();
  } catch (...) {
  }
  return std::string(op.qualified) + ": " + what;
}

}  // namespace sardonyx::detail
