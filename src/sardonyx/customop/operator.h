// Operator tables shared by torch and ONNX Runtime: tensors, attributes, types and kernels; and functions of shape rules.
#pragma once

#ifdef __clang__
#define SARDONYX_UNOPTIMISED __attribute__((optnone, noinline))
#else
#define SARDONYX_UNOPTIMISED __attribute__((optimize("O0"), noinline))
#endif

namespace sardonyx::detail {

// A size in a shape rule: a number, or unknown during shape inference.
struct Number {
  int64_t value;
  bool known;
  const char* name;  // of an unknown size

  Number() = default;
  Number(int64_t number) : value(number), known(true), name(nullptr) {}
  static Number unknown(const char* name = nullptr) {
    Number n(-1);
    n.known = false;
    n.name = name;
    return n;
  }
};

constexpr int kMaxTensors = 64;  // of a call

struct Unknown {};  // thrown if a condition of a rule depends on an unknown size

struct Sizes {
  int64_t rank;  // or one of these
  Number dims[kMaxDims];
};
constexpr int64_t kAbsent = -1, kUnknownRank = -2;

inline bool present(const Sizes& s) { return s.rank != kAbsent; }
inline int64_t rank_of(const Sizes& s) {
  if (s.rank == kUnknownRank) throw Unknown{};
  return s.rank;
}

template <class F>
Number combine(Number a, Number b, F f) {
  return a.known && b.known ? Number(f(a.value, b.value)) : Number::unknown();
}
inline int64_t floor_div(int64_t a, int64_t b) {
  if (b == 0) fail("its shape rule divides by zero");
  if (b == -1) return -a;  // INT64_MIN / -1 traps
  const int64_t quotient = a / b;
  return quotient - (a % b != 0 && (a < 0) != (b < 0));
}
// An overflow would give small sizes, and too little memory.
template <bool (*operation)(int64_t, int64_t, int64_t*)>
int64_t exact(int64_t x, int64_t y) {
  int64_t result = 0;
  if (operation(x, y, &result)) fail("its shape rule overflows 64 bits");
  return result;
}
inline bool sum_of(int64_t x, int64_t y, int64_t* to) { return __builtin_add_overflow(x, y, to); }
inline bool difference_of(int64_t x, int64_t y, int64_t* to) { return __builtin_sub_overflow(x, y, to); }
inline bool product_of(int64_t x, int64_t y, int64_t* to) { return __builtin_mul_overflow(x, y, to); }
inline Number add(Number a, Number b) { return combine(a, b, exact<sum_of>); }
inline Number sub(Number a, Number b) { return combine(a, b, exact<difference_of>); }
inline Number mul(Number a, Number b) { return combine(a, b, exact<product_of>); }
inline Number div(Number a, Number b) { return combine(a, b, floor_div); }
inline Number mod(Number a, Number b) {
  return combine(a, b, [](int64_t x, int64_t y) { return x - floor_div(x, y) * y; });
}
inline Number eq(Number a, Number b) { return combine(a, b, [](int64_t x, int64_t y) { return int64_t{x == y}; }); }
inline Number ne(Number a, Number b) { return combine(a, b, [](int64_t x, int64_t y) { return int64_t{x != y}; }); }
inline Number lt(Number a, Number b) { return combine(a, b, [](int64_t x, int64_t y) { return int64_t{x < y}; }); }
inline Number le(Number a, Number b) { return combine(a, b, [](int64_t x, int64_t y) { return int64_t{x <= y}; }); }
inline bool truth(Number a) {
  if (!a.known) throw Unknown{};
  return a.value != 0;
}

inline int64_t known_value(Number n) {
  if (!n.known) throw Unknown{};
  return n.value;
}

inline Number at(const Sizes& s, Number index) {
  const int64_t i = known_value(index), place = i < 0 ? i + rank_of(s) : i;
  if (place < 0 || place >= rank_of(s)) {
    fail("its shape rule reads dimension " + std::to_string(i) + " of a tensor of rank " + std::to_string(s.rank));
  }
  return s.dims[place];
}
inline bool contains(const Sizes& s, Number n) {
  bool unknown = false;
  for (int64_t i = 0; i < rank_of(s); ++i) {
    const Number same = eq(s.dims[i], n);
    if (same.known && same.value) return true;
    unknown |= !same.known;
  }
  if (unknown) throw Unknown{};
  return false;
}
inline const Sizes& nth(const Sizes* list, int64_t count, Number index) {
  const int64_t i = known_value(index), place = i < 0 ? i + count : i;
  if (place < 0 || place >= count) {
    fail("its shape rule reads tensor " + std::to_string(i) + " of a list of " + std::to_string(count));
  }
  return list[place];
}
inline void push(Sizes& s, Number n) {
  if (s.rank == kMaxDims) fail("its shape rule gives more than " + std::to_string(kMaxDims) + " dimensions");
  s.dims[s.rank++] = n;
}
inline Sizes of(std::initializer_list<Number> numbers) {
  Sizes s;
  s.rank = 0;
  for (const Number& n : numbers) push(s, n);
  return s;
}
inline Sizes join(const Sizes& a, const Sizes& b) {
  Sizes s = a;
  rank_of(a);
  for (int64_t i = 0; i < rank_of(b); ++i) push(s, b.dims[i]);
  return s;
}
inline Sizes slice(const Sizes& s, Number begin, Number end) {
  auto place = [&](Number n) {
    const int64_t i = known_value(n);
    return std::clamp<int64_t>(i < 0 ? i + rank_of(s) : i, 0, rank_of(s));
  };
  Sizes part;
  part.rank = 0;
  for (int64_t i = place(begin); i < place(end); ++i) push(part, s.dims[i]);
  return part;
}
inline Sizes broadcast(const Sizes& a, const Sizes& b) {
  const bool first = rank_of(a) >= rank_of(b);
  const Sizes& longer = first ? a : b;
  const Sizes& shorter = first ? b : a;
  Sizes s = longer;
  for (int64_t i = 0; i < shorter.rank; ++i) {
    Number& x = s.dims[i + longer.rank - shorter.rank];
    const Number y = shorter.dims[i];
    if (x.known && x.value == 1) x = y;
    else if (y.known && y.value == 1) continue;
    else if (x.known && y.known && x.value != y.value) {
      fail("sizes " + std::to_string(x.value) + " and " + std::to_string(y.value) + " cannot be broadcast");
    } else if (y.known) x = y;  // the unknown size is y or 1
    else if (!x.known && !(x.name && y.name && std::string_view(x.name) == y.name)) x = Number::unknown();
  }
  return s;
}

// The value of an attribute, in the member for its type.
struct Attribute {
  int64_t i = 0;
  double f = 0;
  std::string_view s;
  List<int64_t> ints = {nullptr, 0};
  List<double> floats = {nullptr, 0};
};
inline Sizes sizes_of(const List<int64_t>& list) {
  Sizes s;
  s.rank = 0;
  for (int64_t x : list) push(s, x);
  return s;
}

// Formats values in messages of shape rules.
inline std::string to_text(Number n) { return n.known ? std::to_string(n.value) : n.name ? n.name : "?"; }
inline std::string to_text(double x) {
  char text[32];
  std::snprintf(text, sizeof text, "%g", x);
  return text;
}
inline std::string to_text(std::string_view text) { return std::string(text); }
template <class Numbers>
std::string listed(const Numbers& numbers, int64_t count) {
  std::string text;
  for (int64_t i = 0; i < count; ++i) text += (i ? ", " : "") + to_text(numbers[i]);
  return text;
}
inline std::string to_text(const List<double>& list) { return "[" + listed(list, list.size()) + "]"; }
inline std::string to_text(const Sizes& s) { return "(" + listed(s.dims, rank_of(s)) + (s.rank == 1 ? ",)" : ")"); }

enum class Kind { kRequired = 0, kOptional = 1, kVariadic = 2 };
enum class Type { kInt, kFloat, kBool, kString, kInts, kFloats };

struct Parameter {  // a tensor input or output
  const char* name;
  Kind kind;
  int64_t rank;  // -1: any
};
struct Field {  // an attribute
  const char* name;
  Type type;
  bool required;
  Attribute default_value;
};
struct Call {
  const Array* inputs;
  int64_t variadic;  // number of tensors of the last input
  Array* outputs;
  Allocator allocator;
  const Attribute* attributes;
  void* runs_on;  // the pool for `Parallel`, or the stream
  Parallel::Run run;
};
struct Instance {  // the kernel for one choice of types
  const int* input_types;
  const int* output_types;
  void (*run)(const Call&);
};
struct Operator {
  const char* qualified;  // "domain::Name"
  const char* domain;     // in ONNX
  const char* name;       // in ONNX
  int version;            // domain version that introduced it in ONNX
  const char* torch_name;
  const Parameter* inputs;
  int input_count;
  const Parameter* outputs;
  int output_count;
  const Field* fields;
  int field_count;
  const int* order;  // of torch's arguments: i for input i, -1 - i for attribute i
  const Instance* instances;
  int instance_count;
  void (*shapes)(const Sizes* inputs, int64_t variadic, const Attribute* attributes, Sizes* outputs);
  bool on_gpu;
};

// An operator's table, and the function that torch calls.
struct Entry {
  const Operator* op;
  const char* space;  // torch namespace
  void (*boxed)(uint64_t* stack, uint64_t inputs, uint64_t outputs);
};

// Registers tables; defined in the part shared by all libraries.
struct EntryRegistrar {
  EntryRegistrar(const Entry* entries, int count);
};
void boxed(const Operator& op, uint64_t* stack);

inline void report(const char* message) {
  if (message) fail(message);
}
inline void report(const std::string& message) {
  if (!message.empty()) fail(message);
}

template <class F>
void finish(const F& kernel) {
  if constexpr (std::is_void_v<decltype(kernel())>) kernel();
  else report(kernel());
}

}  // namespace sardonyx::detail
