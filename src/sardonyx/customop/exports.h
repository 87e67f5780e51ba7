// Exported functions: ONNX Runtime calls the first, Python the others.
#pragma once

#include <cstdio>

#define SARDONYX_EXPORT extern "C" __attribute__((visibility("default")))

sardonyx::detail::EntryRegistrar::EntryRegistrar(const Entry* entries, int count) {
  for (int i = 0; i < count; ++i) registered_entries().push_back(entries + i);
}
void sardonyx::detail::boxed(const Operator& op, uint64_t* stack) { torch_side::call_kernel(op, stack); }

// Returns an error if the processor or ONNX Runtime does not support the library.
static ort::Status* unsupported(const ort::ApiBase* base) {
  char text[160] = "";
  const char* missing = sardonyx::processor::missing(sardonyx::processor::kNeeded);
  if (missing) {
    std::snprintf(text, sizeof text, "these operators are compiled for processors with %s, which this processor lacks", missing);
  } else if (!base->get_api(ort::kVersion)) {
    std::snprintf(text, sizeof text, "these operators need onnxruntime 1.%u or newer, and this is %s", ort::kVersion, base->version());
  }
  if (!*text) return nullptr;
  ort::g_api = base->get_api(1);  // every version supports API 1
  return ort::failure(text);
}

SARDONYX_EXPORT ort::Status* RegisterCustomOps(ort::SessionOptions* options, const ort::ApiBase* base) {
  if (auto* status = unsupported(base)) return status;
  return sardonyx::ort_side::add(options, base);
}
SARDONYX_EXPORT const char* sardonyx_register_torch(const char* library, const char* library_of_cuda) {
  return sardonyx::torch_side::register_kernels(library, library_of_cuda);
}
SARDONYX_EXPORT void sardonyx_unregister_torch() { sardonyx::torch_side::unregister_kernels(); }
SARDONYX_EXPORT const sardonyx::detail::Entry* const* sardonyx_entries(int* count) {
  *count = static_cast<int>(sardonyx::detail::registered_entries().size());
  return sardonyx::detail::registered_entries().data();
}
