// Kernels in Python: the process that declares them sets the callback.
#pragma once

namespace sardonyx::detail {

using Callback = void (*)(const Call* call, const int* input_types, const int* output_types, char* error, size_t room);
inline Callback g_callback = nullptr;

inline void call_python(const Call& call, const int* input_types, const int* output_types) {
  if (!g_callback) fail("its kernel is a Python function, and it is not declared in this process");
  char error[4096] = "";
  g_callback(&call, input_types, output_types, error, sizeof error);
  if (*error) fail(error);
}

}  // namespace sardonyx::detail

extern "C" __attribute__((visibility("default"))) void sardonyx_set_callback(sardonyx::detail::Callback callback) {
  sardonyx::detail::g_callback = callback;
}

// Sets a result from Python; returns an error message, or null.
extern "C" __attribute__((visibility("default"))) const char* sardonyx_set_output(
    const sardonyx::detail::Call* call, int index, const int64_t* dims, int64_t rank, const void* data, size_t bytes) {
  static thread_local std::string error;
  try {
    sardonyx::Out<char> result(call->outputs + index, call->allocator, index);
    void* memory = result.resize(dims, rank);
    if (bytes) std::memcpy(memory, data, bytes);
    return nullptr;
  } catch (const std::exception& failed) {
    error = failed.what();
    return error.c_str();
  }
}
