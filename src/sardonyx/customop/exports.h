// What a library exports: ONNX Runtime calls the first, Python the others.
#pragma once

#include <cstdio>

#define SARDONYX_EXPORT extern "C" __attribute__((visibility("default")))

sardonyx::detail::Enlisted::Enlisted(const Entry* entries, int count) {
  for (int i = 0; i < count; ++i) enlisted().push_back(entries + i);
}
void sardonyx::detail::boxed(const Operator& op, uint64_t* stack) { torch_side::called(op, stack); }

// What the processor or ONNX Runtime lacks, said before anything runs that needs it.
static ort::Status* refused(const ort::ApiBase* base) {
  char text[160] = "";
  const char* lacking = sardonyx::processor::lacking(sardonyx::processor::kNeeded);
  if (lacking) {
    std::snprintf(text, sizeof text, "these operators are compiled for processors with %s, which this one lacks", lacking);
  } else if (!base->get_api(ort::kVersion)) {
    std::snprintf(text, sizeof text, "these operators need onnxruntime 1.%u or newer, and this is %s", ort::kVersion, base->version());
  }
  if (!*text) return nullptr;
  ort::g_api = base->get_api(1);  // every version has the first
  return ort::failure(text);
}

SARDONYX_EXPORT ort::Status* RegisterCustomOps(ort::SessionOptions* options, const ort::ApiBase* base) {
  if (auto* refusal = refused(base)) return refusal;
  return sardonyx::ort_side::add(options, base);
}
SARDONYX_EXPORT const char* sardonyx_into_torch(const char* library, const char* library_of_cuda) {
  return sardonyx::torch_side::enter(library, library_of_cuda);
}
SARDONYX_EXPORT void sardonyx_out_of_torch() { sardonyx::torch_side::leave(); }
SARDONYX_EXPORT const sardonyx::detail::Entry* const* sardonyx_entries(int* count) {
  *count = static_cast<int>(sardonyx::detail::enlisted().size());
  return sardonyx::detail::enlisted().data();
}
